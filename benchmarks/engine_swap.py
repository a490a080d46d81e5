"""Swap against recompute: what a preemption costs the stream that gave up its blocks, over how much KV it had.

A stream of n tokens and a more urgent one share a pool that is one block too small. The urgent one takes the stream's
blocks and leaves; the stream goes on. Lost is what the copies out and in took, or the time to its next output less that
of its usual step. The prefix cache is off: with it, blocks that nobody took meanwhile cost neither way anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.engine_driver import Setup, count_outputs, make_request
from benchmarks.engine_report import Section
from benchmarks.load import filler, median
from common.engine.engine import Engine
from common.engine.step_record import StepRecord
from common.request import Request

BLOCK_SIZE = 16
NUM_USUAL_STEPS = 5
NUM_TOKENS_ONCE = 2048
"""So long a stream is measured once: it takes its time and varies little."""
HEADER = (
    "tokens",
    "first swap ms",
    "swap ms",
    "recompute ms",
    "ratio",
    "auto expects: swap",
    "recompute",
    "auto picks",
)


@dataclass(frozen=True)
class Costs:
    """Of one length, in seconds.

    first_swap: into host memory that nobody has touched yet. expected_swap, expected_recompute: what the engine's own
        measurements say.
    """

    num_tokens: int
    first_swap: float
    swap: float
    recompute: float
    expected_swap: float
    expected_recompute: float
    prefers_swap: bool

    def row(self) -> list[str]:
        return [
            str(self.num_tokens),
            f"{self.first_swap * 1e3:.1f}",
            f"{self.swap * 1e3:.1f}",
            f"{self.recompute * 1e3:.1f}",
            f"{self.recompute / self.swap:.1f}x",
            f"{self.expected_swap * 1e3:.1f}",
            f"{self.expected_recompute * 1e3:.1f}",
            "swap" if self.prefers_swap else "recompute",
        ]


def compare_swap(setup: Setup) -> Section:
    lengths = (64, 128) if setup.is_quick else (64, 256, 1024, 4096)
    found = [measure_costs(setup, num_tokens) for num_tokens in lengths]
    return Section(
        title="swap: a stream loses its blocks to a more urgent one and goes on when that has left",
        meaning="What it loses by it when its KV is copied to the host and back, and when it is computed again.",
        header=HEADER,
        rows=[costs.row() for costs in found],
        notes=(
            describe_crossover(found),
            "first swap: the host pool's pages are new then. auto expects: by what the engine measured in its steps.",
        ),
    )


def describe_crossover(found: list[Costs]) -> str:
    """`found`: by ascending length."""
    cheaper = [costs.num_tokens for costs in found if costs.swap < costs.recompute]
    if len(cheaper) == len(found):
        return f"Swap is cheaper at every length from {found[0].num_tokens} tokens on: they cross below, if at all."
    if not cheaper:
        return f"Recompute is cheaper at every length up to {found[-1].num_tokens} tokens."
    return f"Swap is cheaper at {', '.join(map(str, cheaper))} tokens, recompute at the other lengths."


def measure_costs(setup: Setup, num_tokens: int) -> Costs:
    num_rounds = 1 if num_tokens >= NUM_TOKENS_ONCE else setup.num_rounds
    engine, recomputing = (_build(setup, num_tokens, mode) for mode in ("swap", "recompute"))
    first_swap = PreemptedStream(engine, num_tokens, 0).seconds_lost()
    swap, recompute = [], []
    for number in range(1, num_rounds + 1):
        swap.append(PreemptedStream(engine, num_tokens, number).seconds_lost())
        recompute.append(PreemptedStream(recomputing, num_tokens, number).seconds_lost())
    costs, num_blocks = engine.scheduler.costs, num_tokens // BLOCK_SIZE
    return Costs(
        num_tokens=num_tokens,
        first_swap=first_swap,
        swap=median(swap),
        recompute=median(recompute),
        expected_swap=2 * num_blocks * costs.swap.seconds_per_item,
        expected_recompute=num_tokens * costs.compute.seconds_per_item,
        prefers_swap=costs.prefers_swap(num_tokens, num_blocks),
    )


class PreemptedStream:
    """One stream, preempted once. The engine is empty before and after."""

    def __init__(self, engine: Engine, num_tokens: int, number: int) -> None:
        assert num_tokens % BLOCK_SIZE == 0
        self._engine = engine
        self._swap_seconds = 0.0
        engine.observe_steps(self._observe)
        self._stream = make_request(f"stream{number}", filler(num_tokens - 1, 2 * number), 4 * BLOCK_SIZE)
        self._urgent = make_request(f"urgent{number}", filler(BLOCK_SIZE - 1, 2 * number + 1), 4 * BLOCK_SIZE)
        self._urgent.priority = -1

    def seconds_lost(self) -> float:
        self._preempt()
        to_next_output = self._seconds_to_output()
        swap_seconds = self._swap_seconds
        usual = median([self._seconds_to_output() for _ in range(NUM_USUAL_STEPS)])
        self._engine.abort(self._stream.request_id)
        return swap_seconds or to_next_output - usual  # swapped in, its next step is like any other

    def _preempt(self) -> None:
        self._add_and_wait(self._stream)
        self._engine.add(self._urgent)
        while not self._stream.num_preemptions:
            self._engine.step()
        self._engine.abort(self._urgent.request_id)

    def _add_and_wait(self, request: Request) -> None:
        self._engine.add(request)
        while not request.output_token_ids:
            self._engine.step()

    def _seconds_to_output(self) -> float:
        start = time.perf_counter()
        while not count_outputs(self._engine.step()):
            pass
        return time.perf_counter() - start

    def _observe(self, record: StepRecord) -> None:
        self._swap_seconds += record.swap_seconds


def _build(setup: Setup, num_tokens: int, mode: str) -> Engine:
    """The pool has the stream's blocks, one for the urgent request and one that both want."""
    num_slots = num_tokens + 2 * BLOCK_SIZE
    flags = ["--swap-space", "512MiB", "--preemption-mode", mode, "--no-enable-prefix-caching"]
    return setup.build(num_slots, *flags, block_size=BLOCK_SIZE)
