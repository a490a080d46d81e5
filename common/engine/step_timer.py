"""Times the beats of engine steps and sums each step up. Knows one clock."""

from __future__ import annotations

from common.clock import Clock
from common.engine.step_record import StepRecord
from common.messages import NodeStats
from common.request import RequestStatus
from common.scheduling.output import ScheduledRequest, SchedulerOutput, StepResult


class StepTimer:
    """start_schedule, end_schedule, start_execute, end_execute, end_update, record: in this order. A step that only
    samples from rows that came from elsewhere was not scheduled: it begins when it is executed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._birth = clock.now()
        self._step = 0
        self._scheduled: SchedulerOutput | None = None
        self._schedule_start = self._schedule_seconds = 0.0
        self._execute_start = self.execute_seconds = 0.0
        self._update_seconds = 0.0

    def start_schedule(self) -> None:
        self._schedule_start = self._clock.now()

    def end_schedule(self, batch: SchedulerOutput) -> None:
        self._scheduled = batch
        self._schedule_seconds = self._clock.now() - self._schedule_start

    def start_execute(self) -> None:
        self._execute_start = self._clock.now()

    def end_execute(self) -> None:
        self.execute_seconds = self._clock.now() - self._execute_start

    def end_update(self) -> None:
        self._update_seconds = self._clock.now() - self._execute_start - self.execute_seconds

    def record(
        self, batch: SchedulerOutput, result: StepResult, num_hidden_rows: int, num_cached_blocks: int, stats: NodeStats
    ) -> StepRecord:
        self._step += 1
        is_scheduled = batch is self._scheduled
        num_decode_tokens = sum(_is_decode(rows) for rows in batch.scheduled)
        return StepRecord(
            step=self._step,
            time=(self._schedule_start if is_scheduled else self._execute_start) - self._birth,
            schedule_seconds=self._schedule_seconds if is_scheduled else 0.0,
            execute_seconds=self.execute_seconds,
            update_seconds=self._update_seconds,
            swap_seconds=result.swap_seconds,
            token_budget=batch.token_budget,
            num_scheduled_requests=len(batch.scheduled),
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=batch.num_scheduled_tokens - num_decode_tokens,
            num_hidden_rows=num_hidden_rows,
            num_outputs=len(result.sampled),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_for_kv=stats.num_waiting_for_kv,
            num_swapped=stats.num_swapped,
            num_blocks=stats.num_blocks,
            num_used_blocks=stats.num_blocks - stats.num_free_blocks,
            num_cached_blocks=num_cached_blocks,
            num_unused_slots=stats.num_unused_slots,
            num_preempted=len(batch.preempted),
            num_swap_preempted=sum(request.status is RequestStatus.SWAPPED for request in batch.preempted),
            num_swapped_out=len(batch.swap_outs),
            num_swapped_in=len(batch.swap_ins),
            num_copied=len(batch.copies),
            is_cancelled=result.is_cancelled,
        )


def _is_decode(rows: ScheduledRequest) -> bool:
    return rows.num_tokens == 1 and rows.is_last_chunk and bool(rows.request.output_token_ids)
