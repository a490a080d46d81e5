"""Where an image's build takes torch from, as options of pip: `torch_source.py WHEELS INDEX [EXTRA ...]`.

Wheels in the folder go before the index. They are for CPUs, so an image with the extra `cuda` passes them by.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path


def torch_source(wheels: Path, index: str, extras: Collection[str]) -> list[str]:
    """index: empty for the one that pip is set up to use."""
    if "cuda" not in extras and any(wheels.glob("torch-*.whl")):
        return ["--no-index", "--find-links", str(wheels)]
    return ["--index-url", index] if index else []


if __name__ == "__main__":
    print(*torch_source(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
