"""What fits into equal KV memory, and what lies idle in it: books only, no model, time in steps.

Contiguous reservation books a request's longest possible KV at once; paging books blocks as they are needed, by the
real Scheduler, KVCacheManager and BlockPool. In every arm the trace's requests wait in one queue, first come first
served; a prompt is computed in one step and each running request gets an output in each step. Averages are over the
steps in which requests wait: later it is the workload that is short, not the memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.engine_driver import Setup, make_request
from benchmarks.engine_report import Section
from benchmarks.engine_trace import MAX_MODEL_LEN, TraceRequest, load_trace
from common.kv_layout import KVLayout
from common.model_config import load_model_config
from common.runner.factory import make_layout
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import SampledToken, SchedulerOutput, StepResult
from common.scheduling.scheduler import Scheduler

NUM_SLOTS = 8 * MAX_MODEL_LEN
BLOCK_SIZE = 16
HEADER = ("reservation", "requests at once", "most", "waste", "steps", "preemptions")


@dataclass
class Usage:
    """num_running, waste (share of the allocated slots that hold no KV): of each step in which requests waited."""

    num_running: list[int] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    hit_rate: float = 0.0

    @property
    def mean_running(self) -> float:
        return statistics.mean(self.num_running)

    @property
    def mean_waste(self) -> float:
        return statistics.mean(self.waste)

    def add(self, num_running: int, num_allocated: int, num_unused: int) -> None:
        self.num_running.append(num_running)
        if num_allocated:
            self.waste.append(num_unused / num_allocated)


def compare_memory(setup: Setup) -> Section:
    requests = load_trace(300 if setup.is_quick else 2000)
    layout = make_layout(load_model_config(setup.model_dir), BLOCK_SIZE, "float32")
    longest_out = max(request.num_out for request in requests)
    contiguous: dict[str, Callable[[TraceRequest], int]] = {
        f"contiguous, {MAX_MODEL_LEN} each": lambda request: MAX_MODEL_LEN,
        f"contiguous, prompt + {longest_out}": lambda request: request.num_in + longest_out,
        "contiguous, prompt + own outputs": lambda request: request.num_in + request.num_out,
    }
    usages = {name: book_contiguous(requests, reserve, NUM_SLOTS) for name, reserve in contiguous.items()}
    usages[f"paged, blocks of {BLOCK_SIZE}"] = book_paged(requests, layout, NUM_SLOTS, enable_prefix_caching=False)
    usages["paged, equal prefixes shared"] = book_paged(requests, layout, NUM_SLOTS, enable_prefix_caching=True)
    return Section(
        title=f"memory: {len(requests)} requests of the trace in {NUM_SLOTS:,} slots"
        f" ({NUM_SLOTS * layout.token_bytes / 2**30:.1f} GiB for this model)",
        meaning="How many requests run at once in equal memory, and which share of what is allocated holds no KV.",
        header=HEADER,
        rows=[_row(name, usage) for name, usage in usages.items()],
        notes=(
            f"prompt + {longest_out}: the trace's longest answer as everyone's max_tokens; own outputs: as if they were"
            " known beforehand.",
            "Contiguous arms are flattered: gaps between reservations are not counted against them.",
        ),
    )


def book_contiguous(requests: Sequence[TraceRequest], reserve: Callable[[TraceRequest], int], num_slots: int) -> Usage:
    """Every request holds `reserve(request)` slots from its admission to its end."""
    usage = Usage()
    waiting = list(reversed(requests))
    running: dict[int, tuple[TraceRequest, int]] = {}  # by arrival: the request and its outputs so far
    num_free = num_slots
    while waiting or running:
        while waiting and reserve(waiting[-1]) <= num_free:
            request = waiting.pop()
            num_free -= reserve(request)
            running[len(requests) - len(waiting)] = (request, 0)
        num_running = len(running)
        running = {number: (request, count + 1) for number, (request, count) in running.items()}
        num_free += sum(reserve(request) for request, count in running.values() if count == request.num_out)
        running = {number: (request, count) for number, (request, count) in running.items() if count < request.num_out}
        usage.num_steps += 1
        if waiting:
            num_filled = sum(request.num_in + count - 1 for request, count in running.values())
            num_allocated = num_slots - num_free
            usage.add(num_running, num_allocated, num_allocated - num_filled)
    return usage


def book_paged(
    requests: Sequence[TraceRequest],
    layout: KVLayout,
    num_slots: int,
    *,
    enable_prefix_caching: bool,
    max_num_seqs: int = NUM_SLOTS,
) -> Usage:
    """The real scheduler and its pool of `num_slots` slots; each step's outputs come from nowhere."""
    cache = KVCacheManager(layout, num_slots // layout.block_size + 1, enable_prefix_caching=enable_prefix_caching)
    config = SchedulerConfig(
        max_num_batched_tokens=num_slots,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_waiting=len(requests),
    )
    scheduler = Scheduler(config, cache)
    for number, request in enumerate(requests):
        scheduler.add(make_request(f"r{number}", request.prompt_token_ids(), request.num_out))
    usage = Usage()
    while scheduler.requests:
        batch = scheduler.schedule()
        scheduler.update(batch, _outputs_from_nowhere(batch))
        usage.num_steps += 1
        if scheduler.stats().num_waiting:
            usage.add(len(batch.scheduled), cache.pool.num_used * layout.block_size, cache.num_unused_slots())
    usage.num_preemptions = scheduler.num_preemptions
    usage.hit_rate = cache.num_hit_tokens / max(1, cache.num_queried_tokens)
    return usage


def _outputs_from_nowhere(batch: SchedulerOutput) -> StepResult:
    return StepResult(
        sampled={rows.request.request_id: SampledToken(0) for rows in batch.scheduled if rows.is_last_chunk}
    )


def _row(name: str, usage: Usage) -> list[str]:
    return [
        name,
        f"{usage.mean_running:.1f}",
        str(max(usage.num_running)),
        f"{usage.mean_waste:.1%}",
        str(usage.num_steps),
        str(usage.num_preemptions),
    ]
