"""A line every few seconds while an engine works: tokens a second, queue, KV use. Silent when nothing runs.

traffic role=decode prompt_tokens_per_second=0 output_tokens_per_second=41.8 step_ms=71.7 running=3 ...
"""

from __future__ import annotations

import logging

from common.engine.step_record import StepRecord
from common.logging import log_event
from common.messages import Role

log = logging.getLogger(__name__)

TRAFFIC_SECONDS = 5.0


class TrafficLog:
    """Observes steps; called in the engine's thread."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._start: float | None = None
        self._num_prompt_tokens = self._num_outputs = self._num_preempted = self._num_steps = 0

    def __call__(self, record: StepRecord) -> None:
        end = record.time + record.schedule_seconds + record.execute_seconds + record.update_seconds
        if self._start is None or record.time - self._start > 2 * TRAFFIC_SECONDS:  # it was idle meanwhile
            self._begin(record.time)
        self._num_steps += 1
        self._num_prompt_tokens += 0 if record.is_cancelled else record.num_prefill_tokens
        self._num_outputs += record.num_outputs
        self._num_preempted += record.num_preempted
        assert self._start is not None
        if end - self._start >= TRAFFIC_SECONDS:
            self._write(record, end - self._start)
            self._begin(end)

    def _begin(self, time: float) -> None:
        self._start = time
        self._num_prompt_tokens = self._num_outputs = self._num_preempted = self._num_steps = 0

    def _write(self, record: StepRecord, seconds: float) -> None:
        log_event(
            log,
            "traffic",
            role=self._role,
            prompt_tokens_per_second=round(self._num_prompt_tokens / seconds, 1),
            output_tokens_per_second=round(self._num_outputs / seconds, 1),
            step_ms=round(1000 * seconds / self._num_steps, 1),
            running=record.num_running,
            waiting=record.num_waiting + record.num_waiting_for_kv + record.num_swapped,
            kv_use=round(record.num_used_blocks / record.num_blocks, 3),
            preempted=self._num_preempted,
        )
