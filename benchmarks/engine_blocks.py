"""Block sizes 8, 16 and 32: what each wastes, which prefixes it finds again, how fast the engine is with it.

Waste and hit rate are books of the trace (engine_memory.py); speed is the real engine's: one prompt alone, then streams
that decode together. The engines take turns, so that all see the same machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.engine_driver import Setup, count_outputs, make_request, seconds_to_first_output
from benchmarks.engine_memory import NUM_SLOTS, Usage, book_paged
from benchmarks.engine_report import Section
from benchmarks.engine_trace import TOKENS_PER_HASH, load_trace, share_repeated
from benchmarks.load import filler, median
from common.engine.engine import Engine
from common.kv_layout import BLOCK_SIZES
from common.model_config import load_model_config
from common.runner.factory import make_layout

NUM_AT_ONCE = 16
"""Of the trace: about a quarter of the pool is in use then, the rest is prefix cache."""
HEADER = ("block size", "waste", "hit rate", "prefill tok/s", "decode tok/s")


@dataclass(frozen=True)
class Sizes:
    num_requests: int
    num_in: int
    num_streams: int
    num_stream_in: int
    num_steps: int


@dataclass
class Arm:
    """The engine with one block size, and its speed in each round, in tokens/s."""

    engine: Engine
    usage: Usage
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def row(self, block_size: int) -> list[str]:
        return [
            str(block_size),
            f"{self.usage.mean_waste:.1%}",
            f"{self.usage.hit_rate:.1%}",
            f"{median(self.prefill):.0f}",
            f"{median(self.decode):.0f}",
        ]


def compare_blocks(setup: Setup) -> Section:
    sizes = Sizes(300, 128, 4, 64, 3) if setup.is_quick else Sizes(2000, 512, 8, 256, 8)
    arms = {block_size: _make_arm(setup, sizes, block_size) for block_size in BLOCK_SIZES}
    for arm in arms.values():
        measure_prefill(arm.engine, sizes, -1)  # memory of the first steps is new
    for number in range(setup.num_rounds):
        for arm in arms.values():
            arm.prefill.append(measure_prefill(arm.engine, sizes, number))
    for arm in arms.values():
        _start_streams(arm.engine, sizes)
    for _ in range(setup.num_rounds):
        for arm in arms.values():
            arm.decode.append(measure_decode(arm.engine, sizes))
    bound = share_repeated(load_trace(sizes.num_requests))
    return Section(
        title=f"blocks: {sizes.num_requests} requests of the trace, {NUM_AT_ONCE} at once, in {NUM_SLOTS:,} slots;"
        f" speed: {sizes.num_in} tokens in, {sizes.num_streams} streams of {sizes.num_stream_in}",
        meaning="Small blocks waste fewer slots and match shorter prefixes; large ones need fewer entries and gathers.",
        header=HEADER,
        rows=[arm.row(block_size) for block_size, arm in arms.items()],
        notes=(
            f"hit rate: of prompt tokens; an endless cache would have {bound:.1%}. The trace tells prefixes apart in"
            f" steps of {TOKENS_PER_HASH} tokens only,",
            "so it cannot show what small blocks find beyond: on average (block size - 1) / 2 tokens of a shared prefix"
            " are lost.",
        ),
    )


def measure_prefill(engine: Engine, sizes: Sizes, number: int) -> float:
    """Prompt tokens/s of a request that is alone."""
    request = make_request(f"prompt{number}", filler(sizes.num_in, number), 1)
    return sizes.num_in / seconds_to_first_output(engine, request)


def measure_decode(engine: Engine, sizes: Sizes) -> float:
    """Output tokens/s of the streams together, over some steps."""
    start = time.perf_counter()
    num_outputs = sum(count_outputs(engine.step()) for _ in range(sizes.num_steps))
    return num_outputs / (time.perf_counter() - start)


def _make_arm(setup: Setup, sizes: Sizes, block_size: int) -> Arm:
    layout = make_layout(load_model_config(setup.model_dir), block_size, "float32")
    requests = load_trace(sizes.num_requests)
    usage = book_paged(requests, layout, NUM_SLOTS, enable_prefix_caching=True, max_num_seqs=NUM_AT_ONCE)
    num_slots = 2 * sizes.num_streams * sizes.num_stream_in + 2 * sizes.num_in
    return Arm(setup.build(num_slots, "--no-enable-prefix-caching", block_size=block_size), usage)


def _start_streams(engine: Engine, sizes: Sizes) -> None:
    """Each has its first output when this returns, and more to come than is measured."""
    for number in range(sizes.num_streams):
        prompt = filler(sizes.num_stream_in, 1000 + number)
        engine.add(make_request(f"stream{number}", prompt, sizes.num_stream_in))
    num_outputs = 0
    while num_outputs < sizes.num_streams:
        num_outputs = count_outputs(engine.step())
