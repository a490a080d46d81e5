"""What pip has to install before Tandem itself, read from pyproject.toml: `requirements.py [EXTRA ...]`.

An image's large layer then depends on this list alone, and not on every line of our code. Knows no pip.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """Dependencies, then those of the extras. Raises SystemExit for an extra that does not exist."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        raise SystemExit(f"unknown extra {unknown[0]!r}, must be one of {', '.join(known)}")
    return [*project["dependencies"], *(line for extra in extras for line in known[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
