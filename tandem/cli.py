"""The `tandem` command: picks the process to run and hands the remaining arguments to it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib import metadata

_USAGE = """\
usage: tandem COMMAND [FLAGS]

commands:
  serve     proxy, prefill and decode nodes on this machine, as one service
  proxy     one proxy: the OpenAI API, routing
  prefill   one prefill node: reads prompts, serves their KV blocks
  decode    one decode node: owns requests, samples every token
  steps     draws what a node did, step by step, from the file of --record-steps
  env       what this machine and this installation offer

tandem COMMAND --help lists the flags of a command.
"""
_MODULES = {"proxy": "proxy", "prefill": "prefill_node", "decode": "decode_node"}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `tandem prefill ...` is `python -m prefill_node ...`, and so on."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command in ("-V", "--version"):
        print(f"tandem {metadata.version('tandem-serve')}")
        return 0
    if command == "serve":
        from tandem.serve import main as serve

        return serve(rest)
    if command == "steps":
        from tandem.steps import main as draw_steps

        try:
            return draw_steps(rest)
        except BrokenPipeError:  # `tandem steps FILE | head`: whoever read it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if command == "env":
        from tandem.environment import main as show_environment

        if rest:
            asks_help = rest[0] in ("-h", "--help")
            print("usage: tandem env   (it takes no flags)", file=sys.stdout if asks_help else sys.stderr)
            return 0 if asks_help else 2
        return show_environment()
    if command in _MODULES:
        sys.argv = [f"tandem {command}", *rest]
        runpy.run_module(_MODULES[command], run_name="__main__")
        return 0
    known = ", ".join(("serve", *_MODULES, "steps", "env"))
    print(f"tandem: unknown command {command!r}, must be one of {known}", file=sys.stderr)
    return 2
