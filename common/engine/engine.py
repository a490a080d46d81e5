"""The engine: schedule -> execute -> update, and the events that tell a node what came of it.

    schedule   the scheduler decides rows, reservations, revocations
    execute    the runner computes the rows, and samples from hidden rows that arrive meanwhile
    update     the scheduler books what was computed; finished requests give back their blocks

Nothing else changes scheduler state but the commands between two steps. One thread calls all methods; only
`mark_unwanted`, `add_hidden` for a known request, `check_fits` and `stats` may be called from others. It knows no
tensor: the runner is given to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.clock import Clock, SystemClock
from common.engine.events import (
    BlocksFilledEvent,
    ComputedEvent,
    ComputeStartedEvent,
    Event,
    FailedEvent,
    HiddenEvent,
    OutputEvent,
    ReservedEvent,
    RevokedEvent,
    ScoredEvent,
    SearchEndedEvent,
)
from common.engine.inbox import HiddenInbox
from common.engine.step_record import StepRecord
from common.engine.step_timer import StepTimer
from common.messages import NodeStats
from common.request import Request
from common.scheduling.output import Runner, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from common.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, *, clock: Clock | None = None) -> None:
        self.scheduler = scheduler
        self._timer = StepTimer(clock or SystemClock())
        self._observers: list[Callable[[StepRecord], None]] = []
        self.inbox = HiddenInbox(scheduler.accepts_hidden, scheduler.requests.get)
        self._adopting: dict[str, int] = {}  # until all hidden states of their prompts are used
        self._runner = runner
        self._unwanted: set[str] = set()  # ended by a command that is not applied yet
        self._in_flight: tuple[str, ...] = ()

    # --- commands, between two steps --------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """See `common.scheduling.limits.check_fits`. From any thread."""
        self.scheduler.check_fits(request)

    def add(self, request: Request) -> None:
        """Raises InvalidRequestError or OverloadedError."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; no event follows. Reserved blocks stay until `release_reservation`."""
        self._unwanted.discard(request_id)
        self.scheduler.abort(request_id)

    def release(self, request_id: str) -> None:
        """Nobody reads a computation's blocks any more."""
        self._unwanted.discard(request_id)
        self.scheduler.release(request_id)

    def adopt(self, request_id: str, num_computed_tokens: int) -> None:
        """KV of the first `num_computed_tokens` tokens is in the reserved blocks: the request runs.

        It waits while hidden states of its prompt do: the log-probabilities come before the first output."""
        if self.inbox.has_prompt_rows(request_id):
            self._adopting[request_id] = num_computed_tokens
        else:
            self.scheduler.adopt(request_id, num_computed_tokens)

    def release_reservation(self, request_id: str) -> None:
        """Nothing writes into its reserved blocks any more."""
        self.scheduler.release_reservation(request_id)

    def cancel_remote(self, request_id: str) -> None:
        """Its KV will not be fetched: it is computed here."""
        self.scheduler.cancel_remote(request_id)

    def add_hidden(self, request_id: str, row: np.ndarray, num_tokens: int | None = None) -> bool:
        """A hidden state computed elsewhere, float32 [hidden_size]; gives the next output of a waiting request.

        num_tokens: how many tokens the row stands for, as many as the request had when it came if not given. A row
            that gives no next output (again one, or too late) is dropped. False when the request is not known.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self.inbox.put(request_id, num_tokens or request.num_initial_tokens, row)
        return True

    def add_prompt_hidden(self, request_id: str, start: int, rows: np.ndarray) -> None:
        """Hidden states computed elsewhere of a prompt's tokens from position `start` on, float32 [num_rows,
        hidden_size]: they give its log-probabilities, and the last one the next output."""
        if request_id in self.scheduler.requests:
            self.inbox.put_prompt_rows(request_id, start, rows)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def observe_steps(self, observer: Callable[[StepRecord], None]) -> None:
        """`observer` is called after each executed step, by whoever runs it."""
        self._observers.append(observer)

    # --- from any thread --------------------------------------------------------------------------------------------

    def mark_unwanted(self, request_id: str) -> None:
        """An abort or release of it is on its way: a step that computes for nobody else may stop."""
        self._unwanted.add(request_id)

    def stats(self) -> NodeStats:
        return self.scheduler.stats()

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        batch, events = self.schedule()
        return events + self.execute(batch)

    def schedule(self) -> tuple[SchedulerOutput, list[Event]]:
        """First beat. Its events need not wait for the computing: fetches and sends can go on meanwhile."""
        self._adopt_scored()
        self._timer.start_schedule()
        batch = self.scheduler.schedule()
        events: list[Event] = []
        for request in batch.started:
            events += self._started(request)
        events += [self._reserved(request) for request in batch.reserved]
        events += [RevokedEvent(request.request_id) for request in batch.revoked]
        self._timer.end_schedule(batch)
        return batch, events

    def _adopt_scored(self) -> None:
        for request_id in [key for key in self._adopting if not self.inbox.has_prompt_rows(key)]:
            self.scheduler.adopt(request_id, self._adopting.pop(request_id))

    def execute(self, batch: SchedulerOutput) -> list[Event]:
        """Second and third beat. A runner that raises fails the requests of this step, and no other."""
        if not batch.needs_runner and not self.inbox:
            return []
        self.inbox.open()
        self._timer.start_execute()
        self._in_flight = tuple(rows.request.request_id for rows in batch.scheduled)
        try:
            result = self._runner.execute(batch, self.inbox, self._is_unwanted)
            _check_complete(batch, result)
        except Exception as error:
            log.exception("a step of %d requests failed", len(batch.scheduled))
            return self._fail(batch, error)
        finally:
            self._in_flight = ()
        self._timer.end_execute()
        self._learn(batch, result)
        events = self._update(batch, result)
        self._timer.end_update()
        self._show_observers(batch, result)
        return events

    def _show_observers(self, batch: SchedulerOutput, result: StepResult) -> None:
        if not self._observers:
            return
        num_cached = self.scheduler.cache.pool.num_free_cached
        record = self._timer.record(batch, result, self.inbox.num_outputs_taken, num_cached, self.scheduler.stats())
        for observer in self._observers:
            observer(record)

    def _learn(self, batch: SchedulerOutput, result: StepResult) -> None:
        """What computing and copying cost here, for whoever has to choose between them."""
        costs = self.scheduler.costs
        if num_copied := len(batch.swap_outs) + len(batch.swap_ins):
            costs.swap.observe(num_copied, result.swap_seconds)
        if batch.scheduled and not result.is_cancelled:
            costs.compute.observe(batch.num_scheduled_tokens, self._timer.execute_seconds - result.swap_seconds)

    def _update(self, batch: SchedulerOutput, result: StepResult) -> list[Event]:
        if result.is_cancelled:
            self.inbox.give_back()
            return []
        booked = self.scheduler.update(batch, result)
        events: list[Event] = [ScoredEvent(s.request.request_id, s.start, s.logprobs) for s in result.scored]
        events += [_output(request, token) for request, token in booked.outputs]
        events += [SearchEndedEvent(request.request_id, request) for request in booked.searches]
        for rows in batch.scheduled:
            if rows.request.is_compute_only:
                events += self._computed(rows, result)
        return events + self._end_failed(result)

    def _end_failed(self, result: StepResult) -> list[Event]:
        """Requests for which the runner has a reason instead of an output; the others of the step go on."""
        found = [(self.scheduler.requests.get(request_id), why) for request_id, why in result.failed.items()]
        return [event for request, why in found if request is not None for event in self._fail_one(request, why)]

    def _fail_one(self, request: Request, why: str) -> list[Event]:
        ended = self.scheduler.fail(request)
        return [] if ended is None else [FailedEvent(ended.request_id, why)]

    def _fail(self, batch: SchedulerOutput, error: Exception) -> list[Event]:
        self.scheduler.forget_swap_outs(batch)
        requests = [*(rows.request for rows in batch.scheduled), *self.inbox.taken()]
        return [event for one in requests for event in self._fail_one(one, f"{type(error).__name__}: {error}")]

    def _is_unwanted(self) -> bool:
        return bool(self._in_flight) and all(request_id in self._unwanted for request_id in self._in_flight)

    # --- events -----------------------------------------------------------------------------------------------------

    def _started(self, request: Request) -> list[Event]:
        assert request.num_cached_tokens is not None
        request_id, num_cached = request.request_id, request.num_cached_tokens
        events: list[Event] = [ComputeStartedEvent(request_id, num_cached)]
        if request.is_compute_only and num_cached:
            block_ids = self._block_ids(request_id, 0, num_cached // self.scheduler.cache.block_size)
            events.append(BlocksFilledEvent(request_id, 0, block_ids, num_cached))
        if request.wants_cached_only:
            events.append(ComputedEvent(request_id))
        return events

    def _reserved(self, request: Request) -> ReservedEvent:
        cache, request_id = self.scheduler.cache, request.request_id
        return ReservedEvent(request_id, cache.num_filled_tokens(request_id), tuple(cache.block_ids(request_id)))

    def _computed(self, rows: ScheduledRequest, result: StepResult) -> list[Event]:
        request_id = rows.request.request_id
        events: list[Event] = [self._filled(rows)]
        if (hidden := result.hidden.get(request_id)) is not None:
            events.append(HiddenEvent(request_id, hidden))
        if rows.is_last_chunk:
            events.append(ComputedEvent(request_id))
        return events

    def _filled(self, rows: ScheduledRequest) -> BlocksFilledEvent:
        """Blocks that this chunk filled; with the last one also the partial block."""
        block_size, end = self.scheduler.cache.block_size, rows.start + rows.num_tokens
        first = rows.start // block_size
        last = -(-end // block_size) if rows.is_last_chunk else end // block_size
        if rows.recompute_only:
            first = last  # all were cached, and told when it started
        block_ids = self._block_ids(rows.request.request_id, first, last)
        return BlocksFilledEvent(rows.request.request_id, first, block_ids, end)

    def _block_ids(self, request_id: str, first: int, last: int) -> tuple[int, ...]:
        return tuple(self.scheduler.cache.block_ids(request_id)[first:last])


def _output(request: Request, token: SampledToken) -> OutputEvent:
    num_cached = request.num_cached_tokens
    return OutputEvent(
        request_id=request.request_id,
        request=request,
        index=len(request.output_token_ids) - 1,
        token_id=token.token_id,
        logprobs=token.logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=None if num_cached is None else min(num_cached, request.num_prompt_tokens),
    )


def _check_complete(batch: SchedulerOutput, result: StepResult) -> None:
    """Raises RuntimeError when the runner left out an output or a hidden state it owes."""
    if result.is_cancelled:
        return
    for rows in batch.scheduled:
        answers = result.hidden if rows.request.is_compute_only else result.sampled
        for request in rows.request.samplers if rows.is_last_chunk else ():
            if request.request_id not in answers and request.request_id not in result.failed:
                raise RuntimeError(f"the runner gave nothing for {request}")
