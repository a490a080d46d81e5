"""`tandem config`: what a process would run with, and where each value comes from. Starts nothing.

What it prints is itself a section of a file for --config: values in YAML, origins as comments, secrets left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import yaml
from pydantic import SecretStr

from common.argument_parser import Parser
from common.command_line import Flags, Resolved, plain_value, read_config
from common.config_file import PROCESSES, config_class_of
from common.config_variables import warn_of_unknown_variables

_MAX_VALUE_WIDTH = 40


def main(argv: Sequence[str]) -> int:
    has_name = bool(argv) and not argv[0].startswith("-")
    parser = build_parser()
    if not has_name and {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    process, rest = (argv[0], argv[1:]) if has_name else ("serve", argv)
    parser.parse_args([process, *rest])
    config_class = config_class_of(process)
    assert issubclass(config_class, Flags)
    resolved = read_config(config_class, rest, prog=f"tandem config {process}")
    warn_of_unknown_variables()
    print("\n".join([f"{process}:", *(f"  {line}" for line in lines(resolved))]))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Of the command's own argument; the flags behind it are those of the command that it names."""
    parser = Parser(
        prog="tandem config",
        usage=f"%(prog)s [{'|'.join(PROCESSES)}] [FLAGS OF THAT COMMAND]",
        description="Prints every value that a command would run with and where it comes from: a flag, an environment "
        "variable, a line of the file of --config, or the default. The output is a section of such a file.",
    )
    parser.add_argument("command", choices=list(PROCESSES), help="whose config (default: serve)")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="those of that command")
    return parser


def lines(resolved: Resolved[Flags]) -> list[str]:
    """One for each value, the origins below each other."""
    texts = {name: _text(name, getattr(resolved.config, name)) for name in type(resolved.config).model_fields}
    width = min(max(len(text) for text in texts.values()), max(map(len, texts)) + 2 + _MAX_VALUE_WIDTH)
    return [f"{text:<{width}}  # {resolved.origin(name)}" for name, text in texts.items()]


def _text(name: str, value: object) -> str:
    if isinstance(value, SecretStr):
        return f"# {name}: not shown"
    text = yaml.safe_dump([plain_value(value)], default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return f"{name}: {text.strip()[1:-1]}"
