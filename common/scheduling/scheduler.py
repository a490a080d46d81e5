"""What an engine computes in each step. Pure: no torch, no clock, no thread; the engine drives it.

One rule: there is no prefill and no decode. Every running request has `num_computed_tokens` of its `num_tokens`; each
step spends a token budget to let it catch up. Chunked prefill, prefix hits, fetched KV and recomputing after a
preemption are values of that number.

    add -> WAITING --admit: blocks for all its tokens, all or nothing--> RUNNING --update: last output--> FINISHED
              |  ^                                                        ^   |
              |  '--- PREEMPTED: blocks dropped, outputs kept <-----------|---'  (an older one needs a block)
              '--reserve--> WAITING_FOR_KV --adopt: blocks are in---------'
                                  '--revoked, after release_reservation--> WAITING

Somebody always advances: running requests come in order of precedence and take blocks only from those behind them, so
the first one always gets what it needs, unless blocks are promised from outside (a revoked reservation, a served
computation), and those come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import ConfigError, ContextLengthError, InvalidRequestError, OverloadedError
from common.messages import NodeStats
from common.request import FinishReason, Request, RequestStatus
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from common.scheduling.preemption import count_on_promised, youngest_behind
from common.scheduling.request_queue import RequestQueue
from common.scheduling.reservations import Reservations
from common.scheduling.step_plan import StepPlan
from common.scheduling.stop_rules import apply_stop_rules


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: token budget of a step. max_num_seqs: most requests that run or wait for KV at once.
    max_model_len: most tokens of a request, prompt and outputs. max_num_waiting: bound of the queue."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 2048
    max_num_waiting: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def max_num_running(self) -> int:
        """Never more than the budget has tokens, so that every running request can advance in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Decides steps and keeps the books. Not thread-safe but for `check_fits` and `stats`."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self.config = config
        self.cache = cache
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._reservations = Reservations()
        self._lookups: list[Request] = []  # computations that only want what is cached
        self._held: dict[str, Request] = {}  # finished, but somebody still reads or writes their blocks
        self._num_added = 0

    # --- from outside, between steps --------------------------------------------------------------------------------

    def check_fits(self, num_tokens: int, *, is_compute_only: bool = False) -> None:
        """Raises ContextLengthError or InvalidRequestError when so many tokens, and one output, can never fit."""
        needed = num_tokens if is_compute_only else num_tokens + 1
        if num_tokens < 1:
            raise InvalidRequestError("the prompt has no tokens, at least 1 is needed")
        if needed > self.config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, with at least {needed - num_tokens} for the answer;"
                f" the maximum context length is {self.config.max_model_len} tokens"
            )
        if needed > self.cache.capacity_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, with at least {needed - num_tokens} for the answer;"
                f" the KV cache holds {self.cache.capacity_tokens} tokens"
                f" ({self.cache.pool.num_usable} blocks of {self.cache.block_size})"
            )

    def add(self, request: Request) -> None:
        """Queues it. Raises InvalidRequestError for what can never run, OverloadedError when the queue is full."""
        self.check_fits(request.num_tokens, is_compute_only=request.is_compute_only)
        _check_unfinished(request)
        if request.request_id in self.requests or request.request_id in self._held:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        if len(self._waiting) >= self.config.max_num_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests wait, at most {self.config.max_num_waiting} may")
        self._num_added += 1
        request.order = self._num_added
        request.status = RequestStatus.WAITING
        self.requests[request.request_id] = request
        if request.wants_cached_only:
            self._lookups.append(request)
        else:
            self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends it at once; blocks that another node may still write into stay until `release_reservation`.

        Returns the request, or None when nothing of it was left to end.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def release(self, request_id: str) -> None:
        """Nobody reads a computation's blocks any more; one that still computes is ended."""
        self.abort(request_id)
        if (request := self._held.get(request_id)) is not None and request.is_compute_only:
            self._free_held(request_id)

    def adopt(self, request_id: str, num_computed_tokens: int) -> None:
        """KV of the first `num_computed_tokens` tokens is in the reserved blocks: the request runs, and computes the
        rest. A revoked one leaves its KV in the prefix cache and waits again; one that ended gives its blocks back."""
        self._free_held_reservation(request_id)
        request = self.requests.get(request_id)
        if request is None or request not in self._reservations:
            return
        num_slots = len(self.cache.block_ids(request_id)) * self.cache.block_size
        self.cache.mark_filled(request, min(num_computed_tokens, request.num_tokens, num_slots))
        if self._reservations.take(request):
            self._requeue(request)
            return
        request.wants_remote_kv = False  # if it is preempted, it is computed again here
        self._run(request)

    def release_reservation(self, request_id: str) -> None:
        """The fence: nothing writes into its blocks any more. A live request goes back to its place in the queue."""
        request = self.requests.get(request_id)
        if request is not None and request in self._reservations:
            self._reservations.take(request)
            self._requeue(request)
        self._free_held_reservation(request_id)

    def cancel_remote(self, request_id: str) -> None:
        """Its KV will not be fetched, nothing was and will be written into its blocks: it is computed here."""
        request = self.requests.get(request_id)
        if request is not None:
            request.wants_remote_kv = False
        self.adopt(request_id, 0)

    def reset_prefix_cache(self) -> None:
        self.cache.reset_prefix_cache()

    def accepts_hidden(self, request_id: str, num_tokens: int) -> Request | None:
        """The request, if a hidden state of its token `num_tokens - 1` may give its next output. A running one
        computes that itself."""
        request = self.requests.get(request_id)
        if request is None or request.is_compute_only or request.status is RequestStatus.RUNNING:
            return None
        return request if request.num_tokens == num_tokens else None

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step. What it decided besides rows has already happened when it returns."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._serve_lookups(plan)
        self._schedule_running(plan)
        if not (plan.is_short_of_blocks or plan.preempted):  # what is free now is for those that run
            self._schedule_waiting(plan)
        return plan.output()

    def _serve_lookups(self, plan: StepPlan) -> None:
        for request in self._lookups:
            request.num_cached_tokens = request.num_computed_tokens = self.cache.admit_cached(request)
            plan.started.append(request)
            self._hold(request, FinishReason.STOP)
        self._lookups.clear()

    def _schedule_running(self, plan: StepPlan) -> None:
        """In order of precedence. A long prompt leaves one token for each stream behind it, so that every stream
        advances in every step and the prompt in what is left."""
        requests = self._running.snapshot()
        num_streams_behind = sum(1 for request in requests if self._num_remaining(request) == 1)
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                continue  # gave its blocks to one before it
            remaining = self._num_remaining(request)
            num_streams_behind -= remaining == 1
            count = min(remaining, plan.token_budget - num_streams_behind)
            if count > 0:
                self._schedule_rows(request, count, plan)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while self._waiting and len(self._running) + len(self._reservations) < self.config.max_num_running:
            request = self._waiting.first()
            if request.wants_remote_kv:
                is_admitted = self._reserve(request, plan)
            else:
                is_admitted = plan.token_budget > 0 and self._start(request, plan)
            if not is_admitted:
                break  # those behind it must not overtake, or it might wait for ever

    def _start(self, request: Request, plan: StepPlan) -> bool:
        num_cached = self._admit(request, request.num_tokens)
        if num_cached is None:
            return False
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            plan.started.append(request)
        self._waiting.remove(request)
        self._run(request)
        self._schedule_rows(request, min(self._num_remaining(request), plan.token_budget), plan)
        return True

    def _reserve(self, request: Request, plan: StepPlan) -> bool:
        num_slots = min(request.num_tokens + 1, self.cache.capacity_tokens)
        num_cached = self._admit(request, num_slots)
        if num_cached is None:
            return False
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        self._waiting.remove(request)
        request.num_computed_tokens = min(num_cached, request.num_tokens - 1)
        request.status = RequestStatus.WAITING_FOR_KV
        self._reservations.add(request)
        plan.reserved.append(request)
        return True

    def _admit(self, request: Request, num_slots: int) -> int | None:
        """Leaves a block for each stream that runs: to take their next block would soon cost a preemption."""
        num_streams = sum(1 for running in self._running if not running.is_compute_only)
        return self.cache.admit(request, num_slots, num_spare_blocks=num_streams)

    def _run(self, request: Request) -> None:
        """From its filled tokens on; at least the last token is computed, since its output is still to come."""
        num_filled = self.cache.num_filled_tokens(request.request_id)
        request.num_computed_tokens = min(num_filled, request.num_tokens - 1)
        request.status = RequestStatus.RUNNING
        self._running.add(request)

    def _schedule_rows(self, request: Request, count: int, plan: StepPlan) -> None:
        start = request.num_computed_tokens
        count = self._chunk(request, count)
        end = start + count
        is_recompute = self.cache.num_filled_tokens(request.request_id) >= end
        if not is_recompute and not self._make_writable(request, start, end, plan):
            plan.is_short_of_blocks = True
            return
        plan.token_budget -= count
        plan.scheduled.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=count,
                block_table=self.cache.block_ids(request.request_id),
                is_last_chunk=end == request.num_tokens,
                recompute_only=is_recompute,
            )
        )

    def _chunk(self, request: Request, count: int) -> int:
        """A computation's chunk ends at a block edge where it can, so that the block can leave."""
        start, block_size = request.num_computed_tokens, self.cache.block_size
        if not request.is_compute_only or start + count == request.num_tokens:
            return count
        rounded = (start + count) // block_size * block_size - start
        return rounded if rounded > 0 else count

    @staticmethod
    def _num_remaining(request: Request) -> int:
        return request.num_tokens - request.num_computed_tokens

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_writable(self, request: Request, start: int, end: int, plan: StepPlan) -> bool:
        """False when the request must skip this step (see preemption.py)."""
        while True:
            copies = self.cache.prepare_write(request.request_id, start, end)
            if copies is not None:
                plan.copies.extend(copies)
                return True
            missing = self.cache.num_missing_blocks(request.request_id, start, end)
            shortage = missing - self.cache.num_free_blocks
            if count_on_promised(shortage, plan, self.cache, self._reservations, self._held):
                return False
            victim = youngest_behind(request, self._running)
            if victim is None:
                return False
            self._preempt(victim, plan)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        self._running.remove(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(victim)
        self._requeue(victim, RequestStatus.PREEMPTED)

    def _requeue(self, request: Request, status: RequestStatus = RequestStatus.WAITING) -> None:
        self.cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = status
        self._waiting.add(request)

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, batch: SchedulerOutput, result: StepResult) -> list[tuple[Request, SampledToken]]:
        """Books what a step computed; returns the outputs appended, in batch order. A cancelled step changes
        nothing."""
        if result.is_cancelled:
            return []
        for rows in batch.scheduled:
            rows.request.num_computed_tokens = rows.start + rows.num_tokens
            self.cache.mark_filled(rows.request, rows.request.num_computed_tokens)
            if rows.is_last_chunk and rows.request.is_compute_only:
                self._finish(rows.request, FinishReason.STOP)
        appended = [(self.requests.get(request_id), token) for request_id, token in result.sampled.items()]
        return [(request, self._append(request, token)) for request, token in appended if request is not None]

    def _append(self, request: Request, token: SampledToken) -> SampledToken:
        request.append_output(token.token_id)
        limit = min(self.config.max_model_len, self.cache.capacity_tokens + 1)
        if (reason := apply_stop_rules(request, limit)) is not None:
            self._finish(request, reason)
        return token

    def fail(self, request: Request) -> None:
        """Its step failed: the request ends."""
        if request.request_id in self.requests:
            self._finish(request, FinishReason.ERROR)

    # --- the end of a request ---------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Takes it out of every queue. Blocks that another node may still read or write are held."""
        is_held = request in self._reservations or (request.is_compute_only and reason is not FinishReason.ABORT)
        self._dequeue(request)
        if is_held:
            self._hold(request, reason)
        else:
            self.cache.free(request.request_id)
            self._end(request, reason)

    def _dequeue(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request in self._reservations:
            self._reservations.take(request)
        elif request.wants_cached_only:
            self._lookups.remove(request)
        else:
            self._waiting.remove(request)

    def _hold(self, request: Request, reason: FinishReason) -> None:
        self._held[request.request_id] = request
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _free_held_reservation(self, request_id: str) -> None:
        if (request := self._held.get(request_id)) is not None and not request.is_compute_only:
            self._free_held(request_id)

    def _free_held(self, request_id: str) -> None:
        del self._held[request_id]
        self.cache.free(request_id)

    # --- what others may know ---------------------------------------------------------------------------------------

    @property
    def num_held_requests(self) -> int:
        return len(self._held)

    def stats(self) -> NodeStats:
        """Load now and counters; may be called from any thread (each number is right, all together nearly so)."""
        running, waiting, held = self._running.snapshot(), self._waiting.snapshot(), list(self._held)
        queued = sum(request.num_tokens for request in waiting if not request.wants_remote_kv)
        return NodeStats(
            num_running=len(running),
            num_waiting=len(waiting),
            num_waiting_for_kv=len(self._reservations),
            num_queued_tokens=queued + sum(map(self._num_remaining, running)),
            num_free_blocks=self.cache.num_free_blocks,
            num_blocks=self.cache.pool.num_usable,
            num_held_blocks=sum(len(self.cache.block_ids(request_id)) for request_id in held),
            prefix_cache_queries=self.cache.num_queried_tokens,
            prefix_cache_hits=self.cache.num_hit_tokens,
            num_preemptions=self.num_preemptions,
        )

    def check_integrity(self) -> None:
        """AssertionError unless queues, tables and pool agree."""
        self.cache.check_integrity()
        queues: list[tuple[RequestStatus, Callable[[Request], bool]]] = [
            (RequestStatus.RUNNING, self._running.__contains__),
            (RequestStatus.WAITING_FOR_KV, self._reservations.__contains__),
        ]
        for request in self.requests.values():
            for status, is_queued in queues:
                assert (request.status is status) == is_queued(request), f"{request} is in the wrong queue"
            has_blocks = self.cache.has_table(request.request_id)
            assert has_blocks == (request in self._running or request in self._reservations), f"{request}: blocks?"


def _check_unfinished(request: Request) -> None:
    """Raises InvalidRequestError when a request that moved here has had all its outputs."""
    max_tokens = None if request.params is None else request.params.max_tokens
    if max_tokens is not None and len(request.output_token_ids) >= max_tokens:
        raise InvalidRequestError(
            f"the request came with {len(request.output_token_ids)} outputs and max_tokens is {max_tokens}:"
            " nothing is left to generate"
        )
