"""Who looks at a node's engine steps: its histograms and its traffic log always, a file with `--record-steps`.

All are called in the engine's thread and cost a step a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.config import NodeFlags
from common.engine.engine import Engine
from common.engine.step_log import StepLogHeader, StepRecorder
from common.engine.step_record import StepRecord
from common.engine.traffic_log import TrafficLog
from common.messages import Role
from common.metrics import ITERATION_TOKENS, STEP_SECONDS, Metrics


@contextmanager
def observed_steps(engine: Engine, flags: NodeFlags, metrics: Metrics, node: str, role: Role) -> Iterator[None]:
    """Observes the steps of an engine that is neither started before nor running after.

    Raises ConfigError when the file of --record-steps cannot be written.
    """
    engine.observe_steps(StepMetrics(metrics, node, role))
    engine.observe_steps(TrafficLog(role))
    if flags.record_steps is None:
        yield
        return
    recorder = StepRecorder(flags.record_steps, _header(engine, flags, node, role))
    engine.observe_steps(recorder)
    try:
        yield
    finally:
        recorder.close()


class StepMetrics:
    """Histograms of one engine's steps."""

    def __init__(self, metrics: Metrics, node: str, role: Role) -> None:
        self._tokens = metrics.histogram(ITERATION_TOKENS, node=node, role=role)
        self._seconds = metrics.histogram(STEP_SECONDS, node=node, role=role)

    def __call__(self, record: StepRecord) -> None:
        self._seconds.observe(record.schedule_seconds + record.execute_seconds + record.update_seconds)
        num_tokens = record.num_decode_tokens + record.num_prefill_tokens
        if num_tokens and not record.is_cancelled:  # a step may only sample from rows that came from elsewhere
            self._tokens.observe(num_tokens)


def _header(engine: Engine, flags: NodeFlags, node: str, role: Role) -> StepLogHeader:
    config, cache = engine.scheduler.config, engine.scheduler.cache
    return StepLogHeader(
        role=role,
        node=node,
        model=flags.public_model_name,
        block_size=cache.block_size,
        num_blocks=cache.pool.num_usable,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
