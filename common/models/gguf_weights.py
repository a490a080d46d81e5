"""Reads the matrices of a converted GGUF file in their own 4 or 8 bits.

common/checkpoints/gguf_quantized.py tells how they are stored. Knows no model: it gives what there is under a name, and
says of which type every matrix of the file was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.checkpoints.gguf_quantized import QUANTIZED_FILE
from common.errors import CheckpointError
from kernels.ops import QuantizedWeight


def has_gguf_weights(directory: Path) -> bool:
    """Whether the checkpoint was made of a GGUF file."""
    return (directory / QUANTIZED_FILE).is_file()


class GGUFWeights:
    """An open file; use as a context manager. Raises CheckpointError when it is missing, cut short or damaged."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / QUANTIZED_FILE
        self._opened = ExitStack()
        try:
            self._file = self._opened.enter_context(safe_open(str(self._path), framework="pt"))
            self._entries: dict[str, dict[str, Any]] = json.loads(self._file.metadata()["weights"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}") from None

    def __enter__(self) -> GGUFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def get(self, name: str) -> QuantizedWeight | None:
        """None where this tensor is not here: its type has other bits, or it is no matrix."""
        entry = self._entries.get(name)
        if entry is None or "format" not in entry:
            return None
        try:
            q, scales = self._file.get_tensor(f"{name}.q"), self._file.get_tensor(f"{name}.scales")
            has_offsets = f"{name}.offsets" in self._file.keys()  # noqa: SIM118  # not a dict
            offsets = self._file.get_tensor(f"{name}.offsets") if has_offsets else None
            unpacked = q if entry["format"] == "int8" else _unpacked(q, entry["group_size"])
            return QuantizedWeight(entry["format"], unpacked, scales, offsets, entry["group_size"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read: {error}") from None

    def describe(self, formats: Mapping[str, str]) -> str:
        """formats: what each matrix is served as, by name. 'Q4_1 as int4 210, Q8_0 as int8 1', most first."""
        counts = Counter((self._entries[name]["type"], form) for name, form in formats.items() if name in self._entries)
        return ", ".join(f"{kind} as {form} {count}" for (kind, form), count in counts.most_common())


def _unpacked(q: torch.Tensor, group_size: int) -> torch.Tensor:
    """uint8 [out, in / 2] -> [out, in]: of a group first all low halves, then all high ones."""
    groups = q.view(q.shape[0], -1, group_size // 2)
    return torch.cat((groups & 15, groups >> 4), dim=-1).view(q.shape[0], -1)
