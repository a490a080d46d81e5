"""What a step costs beside the model: deciding it, booking it, its events, its input tensors.

The engine is the real one with a full house of streams; its runner builds the tensors of each step, as the model runner
does, and computes nothing. The attention plan is told apart: it is the reference kernel's own preparation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.engine_driver import Setup, make_request
from benchmarks.engine_report import Check, Section
from benchmarks.load import filler, median
from common.engine.engine import Engine
from common.kv_layout import KVLayout
from common.model_config import ModelConfig, load_model_config
from common.runner.factory import make_layout
from common.runner.input_batch import InputBatch
from common.runner.kv_cache import TORCH_DTYPES
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import CancelCheck, Inbox, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from common.scheduling.scheduler import Scheduler
from kernels.plan import AttentionShape, make_plan

NUM_STREAMS, NUM_IN, BLOCK_SIZE = 64, 512, 16
HEADER = ("part of a step", "median us", "99% us")


class TensorRunner:
    """Builds each step's input tensors and the plan once more by itself; samples token 0.

    seconds, batch_seconds, plan_seconds: of each step: all of `execute`, building the batch with its plan, the plan.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._input_batch = InputBatch(shape)
        self.seconds: list[float] = []
        self.batch_seconds: list[float] = []
        self.plan_seconds: list[float] = []

    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult:
        start = time.perf_counter()
        self._input_batch.make(batch.scheduled)
        built = time.perf_counter()
        self.batch_seconds.append(built - start)
        self.plan_seconds.append(self._seconds_of_plan(batch.scheduled))
        last = [rows.request.request_id for rows in batch.scheduled if rows.is_last_chunk]
        result = StepResult(sampled={request_id: SampledToken(0) for request_id in last})
        self.seconds.append(time.perf_counter() - start)
        return result

    def _seconds_of_plan(self, scheduled: Sequence[ScheduledRequest]) -> float:
        positions = np.concatenate([np.arange(rows.start, rows.start + rows.num_tokens) for rows in scheduled])
        tables = [rows.block_table for rows in scheduled]
        owners = np.repeat(np.arange(len(scheduled)), [rows.num_tokens for rows in scheduled])
        blocks = np.array([tables[i][p // BLOCK_SIZE] for i, p in zip(owners, positions, strict=True)])
        ends = [rows.start + rows.num_tokens for rows in scheduled]
        counts = [rows.num_tokens for rows in scheduled]
        start = time.perf_counter()
        make_plan(self._shape, counts, ends, tables, blocks, positions % BLOCK_SIZE)
        return time.perf_counter() - start


def measure_bookkeeping(setup: Setup) -> Section:
    num_steps = 100 if setup.is_quick else 1000
    config = load_model_config(setup.model_dir)
    layout = make_layout(config, BLOCK_SIZE, "float32")
    scheduling = _scheduling_seconds(_full_house(layout), num_steps)
    runner = TensorRunner(_attention_shape(config, layout))
    step = _engine_seconds(_full_house(layout), runner, num_steps)
    parts = {
        "scheduler: schedule and update": np.array(scheduling),
        "engine: events, inbox, record": np.array(step) - runner.seconds[-num_steps:] - median(scheduling),
        "input batch: tensors": np.array(runner.batch_seconds[-num_steps:]) - runner.plan_seconds[-num_steps:],
    }
    plan = np.array(runner.plan_seconds[-num_steps:])
    total = sum(float(np.median(seconds)) for seconds in parts.values())
    rows = [_row(name, seconds) for name, seconds in parts.items()]
    rows += [["together", f"{total * 1e6:.0f}", ""], _row("attention plan of the reference kernel", plan)]
    return Section(
        title=f"bookkeeping: {NUM_STREAMS} streams of {NUM_IN} to {NUM_IN + NUM_STREAMS} tokens, {num_steps} steps",
        meaning="What a step costs beside the model. The plan is the CPU kernel's preparation, not bookkeeping.",
        header=HEADER,
        rows=rows,
        checks=[Check("bookkeeping of a step", total * 1e3, 1.0, " ms", is_limit=True)],
    )


def _full_house(layout: KVLayout) -> Scheduler:
    """All streams added. Their lengths differ, so that they do not all take a new block in the same step."""
    config = SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=NUM_STREAMS, max_model_len=8192)
    scheduler = Scheduler(config, KVCacheManager(layout, NUM_STREAMS * config.max_model_len // BLOCK_SIZE + 1))
    for number in range(NUM_STREAMS):
        scheduler.add(make_request(f"r{number}", filler(NUM_IN + number, number), 4096))
    return scheduler


def _scheduling_seconds(scheduler: Scheduler, num_steps: int) -> list[float]:
    """Of each step in which all streams decode."""
    seconds: list[float] = []
    while len(seconds) < num_steps:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = StepResult(sampled={s.request.request_id: SampledToken(0) for s in batch.scheduled if s.is_last_chunk})
        computed = time.perf_counter()
        scheduler.update(batch, result)
        if len(batch.scheduled) == batch.num_scheduled_tokens == NUM_STREAMS:
            seconds.append(time.perf_counter() - computed + scheduled - start)
    return seconds


def _engine_seconds(scheduler: Scheduler, runner: TensorRunner, num_steps: int) -> list[float]:
    """Of each whole step in which all streams decode, the last `num_steps` that the runner saw."""
    engine = Engine(scheduler, runner)
    engine.observe_steps(lambda _record: None)  # a node's metrics look at each step
    while engine.stats().num_waiting or engine.stats().num_queued_tokens > NUM_STREAMS:
        engine.step()
    seconds: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        events = engine.step()
        seconds.append(time.perf_counter() - start)
        assert len(events) == NUM_STREAMS
    return seconds


def _attention_shape(config: ModelConfig, layout: KVLayout) -> AttentionShape:
    return AttentionShape(
        num_layers=layout.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        dtype=TORCH_DTYPES[layout.dtype],
    )


def _row(name: str, seconds: np.ndarray) -> list[str]:
    return [name, f"{np.median(seconds) * 1e6:.0f}", f"{np.percentile(seconds, 99) * 1e6:.0f}"]
