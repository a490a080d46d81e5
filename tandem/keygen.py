"""`tandem keygen`: makes a cluster secret, in a file that only its owner can read, or on the standard output."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from common.argument_parser import Parser
from common.cluster_secret import new_secret_text
from common.errors import ConfigError, TandemError


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 when the file cannot be written."""
    path = build_parser().parse_args(argv).file
    try:
        if path is None:
            print(new_secret_text())
        else:
            write_secret(path)
            print(
                f"wrote a cluster secret to {path}; start every process with --cluster-secret-file {path}",
                file=sys.stderr,
            )
    except TandemError as error:
        print(f"tandem keygen: {error.message}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem keygen",
        description="Makes a cluster secret: 32 random bytes as text. All processes of a cluster are started with the"
        " same one (--cluster-secret-file FILE); the connections between them are then encrypted, and nobody else is"
        " let in.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="where to write it, with mode 0600; default: standard output"
    )
    return parser


def write_secret(path: Path) -> None:
    """Never replaces a file. Raises ConfigError; nothing half-written is left then."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already, and a new secret would lock out every process that was started with it;"
            " name another file, or remove this one first"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret_text() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
