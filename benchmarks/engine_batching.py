"""Continuous against static batching: the same engine, the same requests, the same room for requests.

Static admits a batch and waits for its longest answer; continuous gives a place away as soon as it is free. An ended
request leaves the static batch too and costs nothing more, so this is the difference of the schedules alone.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine_driver import Drive, Setup, drive, make_request
from benchmarks.engine_report import Check, Section
from benchmarks.engine_trace import SCALE, load_trace
from benchmarks.load import filler, median
from common.engine.engine import Engine
from common.request import Request

NUM_IN = 8
HEAVY_TAIL_MEAN, HEAVY_TAIL_SIGMA = 14.0, 1.3
NUM_TRACED = 64
HEADER = ("output lengths", "mean", "CV", "longest", "static tok/s", "steps", "batch", "continuous tok/s", "steps",
          "batch", "by steps", "ratio")  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    num_requests: int
    batch_size: int


def compare_batching(setup: Setup) -> Section:
    sizes = Sizes(32, 4) if setup.is_quick else Sizes(128, 8)
    engine = setup.build(8192, "--max-num-seqs", str(sizes.batch_size), "--no-enable-prefix-caching")
    drive(engine, [_requests([4] * sizes.batch_size)])  # memory of the first steps is new
    heavy = heavy_tailed_lengths(sizes.num_requests, HEAVY_TAIL_MEAN, HEAVY_TAIL_SIGMA)
    traced = [request.num_out for request in load_trace(min(NUM_TRACED, sizes.num_requests))]
    rows, ratio = [], 0.0
    for name, lengths, num_rounds in (("trace", traced, 1), ("heavy-tailed", heavy, setup.num_rounds)):
        arms = [_both(engine, _shuffled(lengths, i), sizes.batch_size) for i in range(num_rounds)]
        ratio = median([continuous.tokens_per_second / static.tokens_per_second for static, continuous in arms])
        rows.append(_row(name, lengths, sizes.batch_size, arms, ratio))
    return Section(
        title=f"batching: {NUM_IN} tokens in, at most {sizes.batch_size} requests at once",
        meaning="Static fills the batch anew when all of it ended; continuous fills each place as it becomes free.",
        header=HEADER,
        rows=rows,
        notes=(
            f"heavy-tailed: {len(heavy)} quantiles of a lognormal, sigma {HEAVY_TAIL_SIGMA}, shuffled anew each round.",
            f"trace: {len(traced)} outputs of the trace / {SCALE}, whose tail is light (CV below 1); one round.",
            "by steps: the ratio if each step cost the same. A fuller step costs more on a CPU, so the ratio is less.",
        ),
        checks=[Check("continuous over static, heavy-tailed outputs", ratio, 2.0, "x")],
    )


def heavy_tailed_lengths(count: int, mean: float, sigma: float) -> list[int]:
    """Evenly spaced quantiles of a lognormal: the same set in each run, no luck in it; ascending, at least 1."""
    normal = statistics.NormalDist(math.log(mean) - sigma * sigma / 2, sigma)
    return [max(1, round(math.exp(normal.inv_cdf((i + 0.5) / count)))) for i in range(count)]


def num_static_steps(lengths: Sequence[int], batch_size: int) -> int:
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))


def num_continuous_steps(lengths: Sequence[int], batch_size: int) -> int:
    """Each goes to the place that is free first."""
    places = [0] * batch_size
    for length in lengths:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


def _both(engine: Engine, lengths: Sequence[int], batch_size: int) -> tuple[Drive, Drive]:
    """(static, continuous), one after the other."""
    starts = range(0, len(lengths), batch_size)
    static = drive(engine, [_requests(lengths[i : i + batch_size], first=i) for i in starts])
    return static, drive(engine, [_requests(lengths)])


def _requests(lengths: Sequence[int], *, first: int = 0) -> list[Request]:
    return [make_request(f"r{i}", filler(NUM_IN, i), length) for i, length in enumerate(lengths, first)]


def _shuffled(lengths: Sequence[int], seed: int) -> list[int]:
    return random.Random(seed).sample(lengths, len(lengths))


def _row(
    name: str, lengths: Sequence[int], batch_size: int, arms: Sequence[tuple[Drive, Drive]], ratio: float
) -> list[str]:
    predicted = [_predicted(_shuffled(lengths, i), batch_size) for i in range(len(arms))]
    mean = statistics.mean(lengths)
    cells = [name, f"{mean:.1f}", f"{statistics.pstdev(lengths) / mean:.2f}", str(max(lengths))]
    for drives in zip(*arms, strict=True):
        cells.append(f"{median([d.tokens_per_second for d in drives]):.1f}")
        cells.append(f"{median([d.num_steps for d in drives]):.0f}")
        cells.append(f"{median([d.mean_batch for d in drives]):.1f}")
    return [*cells, f"{median(predicted):.2f}x", f"{ratio:.2f}x"]


def _predicted(lengths: Sequence[int], batch_size: int) -> float:
    return num_static_steps(lengths, batch_size) / num_continuous_steps(lengths, batch_size)
