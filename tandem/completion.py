"""`tandem completion`: the shell's part of completing commands and flags, and ours, both through argcomplete.

At each Tab the shell runs `tandem` with _ARGCOMPLETE set; only the parser of the command on the line is built then.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from common.argument_parser import Parser

_SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    print(shellcode(["tandem"], shell=build_parser().parse_args(argv).shell))
    return 0


def complete(commands: Mapping[str, str], parser_of: Callable[[str], argparse.ArgumentParser]) -> None:
    """Writes the completions of the line that the shell is at, and ends the process. commands: what each does."""
    named = os.environ.get("COMP_LINE", "").split()[1:2]
    parser = Parser(prog="tandem")
    making: Any = _given  # a function stands for the class that argparse calls
    choices: Any = parser.add_subparsers(parser_class=making)
    for name, summary in commands.items():
        choices.add_parser(name, help=summary, parser=parser_of(name) if [name] == named else Parser(prog=name))
    CompletionFinder()(parser, always_complete_options="long")


def _given(*, parser: argparse.ArgumentParser, **_: Any) -> argparse.ArgumentParser:
    """The parser of a command, which is made already."""
    return parser


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem completion",
        usage="%(prog)s {bash,zsh,fish}",
        description="Prints what makes a shell complete the commands and flags of tandem.",
        epilog='bash and zsh: eval "$(tandem completion bash)" in ~/.bashrc, "$(tandem completion zsh)" in ~/.zshrc.'
        " fish: tandem completion fish > ~/.config/fish/completions/tandem.fish",
    )
    parser.add_argument("shell", choices=_SHELLS, help="which shell")
    return parser
