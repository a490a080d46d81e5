"""`tandem steps FILE`: what a node did, step by step, as a summary and a chart, from the file of --record-steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.argument_parser import Parser
from common.engine.step_log import StepLogHeader, read_step_log
from common.engine.step_record import StepRecord
from common.errors import ConfigError, TandemError

Array = npt.NDArray[Any]

_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Steps:
    """A step log in columns: `columns["num_running"][i]` is that field of step i; at least one step."""

    header: StepLogHeader
    columns: dict[str, Array]

    def __getitem__(self, field: str) -> Array:
        return self.columns[field]

    def __len__(self) -> int:
        return len(self["step"])

    @property
    def seconds(self) -> Array:
        """How long each step took."""
        total: Array = self["schedule_seconds"] + self["execute_seconds"] + self["update_seconds"]
        return total

    @property
    def tokens(self) -> Array:
        total: Array = self["num_decode_tokens"] + self["num_prefill_tokens"]
        return total


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when the file or the chart is at fault, 2 for a wrong flag."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    source: Path = arguments.file
    output: Path = arguments.output or source.with_suffix(".png")
    if output.suffix.lower() not in _SUFFIXES:
        parser.error(f"--output is {output}, must end with {' or '.join(_SUFFIXES)}")
    if arguments.start is not None and arguments.end is not None and arguments.start >= arguments.end:
        parser.error(f"--from is {arguments.start:g}, must be less than --to, which is {arguments.end:g}")
    try:
        steps = load(source, arguments.start, arguments.end)
        print("\n".join([f"{source}", *summary(steps)]), flush=True)
        _draw(steps, output)
    except TandemError as error:
        print(f"tandem steps: {error.message}", file=sys.stderr)
        return 1
    print(f"  chart        {output}")
    return 0


def load(path: Path, start: float | None = None, end: float | None = None) -> Steps:
    """The steps that began in [start, end), in seconds of the file. Raises ConfigError when there are none."""
    log = read_step_log(path)
    if not log.records:
        raise ConfigError(
            f"{path} has no steps: the node has computed or written nothing yet (it writes once in a while), or was"
            " killed before"
        )
    columns = {
        name: np.array([getattr(record, name) for record in log.records]) for name in StepRecord.__struct_fields__
    }
    time = columns["time"]
    chosen = (time >= (-np.inf if start is None else start)) & (time < (np.inf if end is None else end))
    if not chosen.any():
        raise ConfigError(f"no step of {path} began in that time; its steps began at {time[0]:.3f} to {time[-1]:.3f} s")
    return Steps(log.header, {name: column[chosen] for name, column in columns.items()})


def summary(steps: Steps) -> list[str]:
    """A few lines of text."""
    header, seconds, tokens = steps.header, steps.seconds, steps.tokens
    span = float(steps["time"][-1] + seconds[-1] - steps["time"][0])
    num_blocks, num_used = int(steps["num_blocks"].max()), int(steps["num_used_blocks"].max())
    num_preempted, num_swapped = int(steps["num_preempted"].sum()), int(steps["num_swap_preempted"].sum())
    middle, late = np.percentile(seconds, [50, 99]) * 1e3
    whole = max(float(seconds.sum()), 1e-9)
    parts = ", ".join(f"{part} {_percent(steps[f'{part}_seconds'].sum() / whole)}" for part in _PARTS)
    rows = {
        "node": f"{header.role} {header.node}, {header.model}",
        "steps": f"{len(steps):,} in {span:.1f} s, busy {_percent(whole / max(span, whole))} of it",
        "tokens": f"{tokens.sum():,} (prefill {steps['num_prefill_tokens'].sum():,}, decode"
        f" {steps['num_decode_tokens'].sum():,}), {steps['num_outputs'].sum():,} outputs",
        "mean batch": f"{tokens.mean():.1f} of {header.max_num_batched_tokens} tokens,"
        f" {steps['num_scheduled_requests'].mean():.1f} of {header.max_num_seqs} requests",
        "step time": f"p50 {middle:.1f} ms, p99 {late:.1f} ms, longest {seconds.max() * 1e3:.1f} ms ({parts})",
        "preemptions": f"{num_preempted:,} (recompute {num_preempted - num_swapped:,}, swap {num_swapped:,})",
        "peak KV use": f"{num_used:,} of {num_blocks:,} blocks ({_percent(num_used / max(num_blocks, 1))})",
    }
    if num_cancelled := int(steps["is_cancelled"].sum()):
        rows["cancelled"] = f"{num_cancelled:,} steps that nobody wanted any more"
    return [f"  {name:<12} {text}" for name, text in rows.items()]


_PARTS = ("schedule", "execute", "update")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _draw(steps: Steps, output: Path) -> None:
    try:
        from tandem.step_chart import draw
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "the chart needs matplotlib, which is not installed: pip install 'tandem-serve[plot]'"
        ) from None
    try:
        draw(steps, output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from None


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem steps",
        usage="%(prog)s FILE [FLAGS]",
        description="Sums up the steps that a node recorded with --record-steps and draws them over time: what was in "
        "each batch, KV blocks, queues, preemptions, how long each step took.",
        epilog="Time counts from the engine's start. `tandem serve --record-steps steps.jsonl` records each node into "
        "a file of its own, such as steps.decode.jsonl.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file that a node wrote with --record-steps")
    parser.add_argument(
        "--output", metavar="PATH", type=Path, help="chart to write, .png or .svg (default: FILE's name with .png)"
    )
    parser.add_argument("--from", dest="start", metavar="SECONDS", type=float, help="leave out steps before this time")
    parser.add_argument("--to", dest="end", metavar="SECONDS", type=float, help="leave out steps from this time on")
    return parser
