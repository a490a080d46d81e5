"""The `tandem` command: picks what to run and hands the remaining arguments to it.

Nothing is imported before it is known what for: `tandem --help` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

_COMMANDS = {
    "serve": "proxy, prefill and decode nodes on this machine, as one service",
    "proxy": "one proxy: the OpenAI API, routing",
    "prefill": "one prefill node: reads prompts, serves their KV blocks",
    "decode": "one decode node: owns requests, samples every token",
    "chat": "a conversation in the terminal with any OpenAI endpoint",
    "status": "pools and nodes of a running service, once or live",
    "models": "models on this machine: list, pull, remove",
    "config": "what a command would run with, and where each value comes from",
    "env": "what this machine and this installation offer, for bug reports",
    "steps": "draws what a node did, step by step, from the file of --record-steps",
    "keygen": "makes the secret that the processes of a cluster share",
    "completion": "makes a shell complete these commands and their flags",
}
_PROCESSES = {"proxy": "proxy", "prefill": "prefill_node", "decode": "decode_node"}
_MODULES = {"config": "show_config", "env": "environment"}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `tandem prefill ...` is `python -m prefill_node ...`, and so on."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may stand at the cursor
        from tandem.completion import complete

        complete(_COMMANDS, parser_of)
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding cannot say is escaped, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 0
    try:
        try:
            status = _run(command, rest)
        finally:
            _flush_output()
    except BrokenPipeError:  # `tandem config | head`: whoever read it has seen enough
        _discard_output()
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:  # a file's, not the output's
            raise
        _discard_output()
        with contextlib.suppress(OSError):
            print(f"tandem {command}: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return status or 1
    except KeyboardInterrupt:
        return 130
    return status


def parser_of(command: str) -> argparse.ArgumentParser:
    """What reads the flags of a command."""
    if command in ("serve", *_PROCESSES):
        from common.command_line import Flags, build_parser
        from common.config_file import config_class_of

        config_class = config_class_of(command)
        assert issubclass(config_class, Flags)
        return build_parser(config_class, f"tandem {command}")
    parser: argparse.ArgumentParser = _module_of(command).build_parser()
    return parser


def _run(command: str, arguments: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0
    if command in ("-V", "--version"):
        print(f"tandem {metadata.version('tandem-serve')}")
        return 0
    if command not in _COMMANDS:
        print(f"tandem: unknown command {command!r}, must be one of {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if command in _PROCESSES:
        sys.argv = [f"tandem {command}", *arguments]
        runpy.run_module(_PROCESSES[command], run_name="__main__")
        return 0
    return int(_module_of(command).main(arguments))


def _module_of(command: str) -> Any:
    return import_module(f"tandem.{_MODULES.get(command, command)}")


def _flush_output() -> None:
    """Now, while a failure can still be told in one line."""
    if sys.stdout is not None:  # `>&-` leaves none
        sys.stdout.flush()


def _discard_output() -> None:
    """Also what is still buffered: the interpreter's end would stumble over it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in _COMMANDS.items())
    return (
        f"usage: tandem COMMAND [FLAGS]\n\ncommands:\n{commands}\n\n"
        "tandem COMMAND --help lists the flags of a command; tandem --version says which version this is.\n"
    )
