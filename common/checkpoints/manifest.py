"""What a finished directory holds, folders in it too: the size of each file, and the sha256 of the small ones.

Written last, so a directory without it is not whole. Large files are checked by size only: their digest would cost
seconds at every start, and a file cut short is by far the most common damage.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "tandem-manifest.json"
_DIGEST_LIMIT_BYTES = 16 << 20


def write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {path.relative_to(directory).as_posix(): _entry(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n", encoding="utf-8")


def find_damage(directory: Path) -> str | None:
    """None when every file is as it was written, else one line that names the first file that is not."""
    try:
        entries = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except OSError:
        return f"{directory / MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{directory / MANIFEST} is not readable"
    damages = (_damage(directory / name, expected) for name, expected in entries.items())
    return next((damage for damage in damages if damage is not None), None)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"bytes": size} if size > _DIGEST_LIMIT_BYTES else {"bytes": size, "sha256": sha256_of(path)}


def _damage(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} has {size} bytes, must have {expected['bytes']}"
        if "sha256" in expected and sha256_of(path) != expected["sha256"]:
            return f"{path} has other content than was written"
    except OSError as error:
        return f"{path} is not readable ({error.strerror})"
    return None
