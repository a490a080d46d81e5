"""Checks a local Hugging Face directory before anything is loaded from it: which file is missing or cut short.

Reads no weights: a safetensors file says in its header how long it must be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


def check_directory(directory: Path) -> None:
    """Raises CheckpointError naming the first file that is missing, unreadable or not as long as it must be."""
    read_json(directory / "config.json")
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{directory / 'tokenizer.json'} is missing")
    for path in weight_files(directory):
        check_safetensors(path)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or not."""
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / _INDEX} has no weight_map")
        return [directory / name for name in sorted(set(weight_map.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no *.safetensors file (other weight formats are not loaded)")
    return files


def check_safetensors(path: Path) -> None:
    """Raises CheckpointError unless the file is exactly as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} is not readable: {why_unreadable(error)}") from None
    expected = 8 + header_bytes + _data_bytes(path, text)
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes, must have {expected}: it is cut short or damaged")


def why_unreadable(error: OSError) -> str:
    """In words. Says who lacks the permission: a container's user is nobody on the machine whose folder it is."""
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return f"{reason}; this process runs as user {os.getuid()}, who must be able to read it"
    return reason


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError unless the file holds a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} is not readable: {why_unreadable(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CheckpointError(f"{path} has no readable safetensors header: it is cut short or damaged") from None
