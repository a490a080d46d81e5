"""How every command line of ours reads: help as wide as the terminal, and errors on one line with the nearest name.

Knows no flag; imports nothing but the standard library, so that any command can start with it.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
from collections.abc import Collection
from typing import Any, NoReturn

_MAX_WIDTH = 110


class Parser(argparse.ArgumentParser):
    """Errors on one line: the usage of twenty flags would bury them. No flag may be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _help_format, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Whatever is left over is an error."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown_message(unknown[0]))
        return known, unknown

    def _unknown_message(self, argument: str) -> str:
        flag = argument.split("=", 1)[0]
        if not flag.startswith("-"):
            return f"argument {argument!r} is not expected"
        return f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}"


def did_you_mean(name: str, known: Collection[str], *, prefix: str = "") -> str:
    """', did you mean NAME?' when one of the known names is near, else nothing. prefix: what all of them begin with, so
    that it makes none of them near."""
    close = difflib.get_close_matches(name.removeprefix(prefix), [one.removeprefix(prefix) for one in known], n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""


def _help_format(prog: str) -> argparse.HelpFormatter:
    columns = shutil.get_terminal_size((_MAX_WIDTH, 24)).columns
    return argparse.HelpFormatter(prog, max_help_position=34, width=min(columns, _MAX_WIDTH))
