"""The engine's memory and scheduling held against the plain ways, in one run in this process.

    python -m benchmarks.engine [--only batching,memory] [--quick]

Comparisons: batching (continuous, static), memory (paged, contiguous), blocks (8, 16, 32), bookkeeping (a step beside
the model), prefix (cold, warm), swap (recompute). Times are medians, and arms that are compared take turns: the ratios
are what counts. Exits with 1 when a target is missed, but not with --quick, whose sizes are too small for the targets.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.engine_batching import compare_batching
from benchmarks.engine_blocks import compare_blocks
from benchmarks.engine_bookkeeping import measure_bookkeeping
from benchmarks.engine_driver import Setup
from benchmarks.engine_memory import compare_memory
from benchmarks.engine_prefix import compare_prefix
from benchmarks.engine_report import Check, Section, describe_machine, names_among
from benchmarks.engine_swap import compare_swap
from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL

COMPARISONS: dict[str, Callable[[Setup], Section]] = {
    "batching": compare_batching,
    "memory": compare_memory,
    "blocks": compare_blocks,
    "bookkeeping": measure_bookkeeping,
    "prefix": compare_prefix,
    "swap": compare_swap,
}


def main() -> int:
    options = _parser().parse_args()
    num_rounds = 1 if options.quick else options.rounds
    setup = Setup(resolve_model(options.model), options.num_threads, num_rounds, options.quick)
    print(f"machine: {describe_machine()}, torch {torch.__version__}, {setup.num_threads} thread(s)")
    print(f"model: {options.model}, float32; each median of {setup.num_rounds}")
    print(f"command: python -m benchmarks.engine {shlex.join(sys.argv[1:])}\n", flush=True)
    checks: list[Check] = []
    for name in options.only:
        start = time.perf_counter()
        section = COMPARISONS[name](setup)
        print(f"{section}({time.perf_counter() - start:.0f} s)\n", flush=True)
        checks += section.checks
    print("== targets", *checks, sep="\n")
    return 0 if setup.is_quick or all(check.is_met for check in checks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--only", type=names_among(COMPARISONS), default=list(COMPARISONS), help=f"some of {', '.join(COMPARISONS)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of small sizes, to see that it runs; no figures to quote"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each time is taken")
    parser.add_argument("--num-threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
