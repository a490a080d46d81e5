"""What an engine computes in each step. Pure: no torch, no clock, no thread; the engine drives it.

One rule: there is no prefill and no decode. Every running request has `num_computed_tokens` of its `num_tokens`; each
step spends a token budget to let it catch up. Chunked prefill, prefix hits, fetched KV and recomputing after a
preemption are values of that number.

    add -> WAITING --admit: blocks for all its tokens, all or nothing--> RUNNING --update: last output--> FINISHED
              |  ^                                                        ^   |
              |  '--- PREEMPTED: blocks dropped, outputs kept <-----------|---+  (an older one needs a block)
              |       SWAPPED: blocks on the host --room again: as it was-|<--'
              '--reserve--> WAITING_FOR_KV --adopt: blocks are in---------'
                                  '--revoked, after release_reservation--> WAITING

A step spends its budget on those that run, then on those that come back, then on new ones: all in order of precedence,
and what was preempted keeps its place. Somebody always advances: running requests take blocks only from those behind
them, so the first one always gets what it needs, unless blocks are promised from outside (a revoked reservation, a
served computation), and those come back.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError, InvalidRequestError, OverloadedError
from common.messages import NodeStats
from common.request import FinishReason, Request, RequestStatus
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.limits import check_fits, check_unfinished
from common.scheduling.output import SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from common.scheduling.preemption import PreemptionCosts, revoke_until_promised, youngest_behind
from common.scheduling.request_queue import RequestQueue
from common.scheduling.reservations import Reservations
from common.scheduling.step_plan import StepPlan
from common.scheduling.stop_rules import apply_stop_rules


class Scheduler:
    """Decides steps and keeps the books. Not thread-safe but for `check_fits` and `stats`."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        if config.preemption_mode == "swap" and not cache.swap_space.num_blocks:
            raise ConfigError("--preemption-mode swap needs --swap-space of at least one block")
        self.config = config
        self.cache = cache
        self.costs = PreemptionCosts()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_swap_preemptions = 0
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._swapped = RequestQueue()
        self._reservations = Reservations()
        self._lookups: list[Request] = []  # computations that only want what is cached
        self._held: dict[str, Request] = {}  # finished, but somebody still reads or writes their blocks
        self._num_added = 0

    # --- from outside, between steps --------------------------------------------------------------------------------

    def check_fits(self, num_tokens: int, *, is_compute_only: bool = False) -> None:
        """See `limits.check_fits`."""
        check_fits(self.config, self.cache, num_tokens, is_compute_only=is_compute_only)

    def add(self, request: Request) -> None:
        """Queues it. Raises InvalidRequestError for what can never run, OverloadedError when the queue is full."""
        self.check_fits(request.num_tokens, is_compute_only=request.is_compute_only)
        check_unfinished(request)
        if request.request_id in self.requests or request.request_id in self._held:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        if len(self._waiting) >= self.config.max_num_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests wait, at most {self.config.max_num_waiting} may")
        self._num_added += 1
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.precedence = (priority, self._num_added)
        request.num_resets_at_start = self.cache.num_resets
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
        """In order of precedence. A long prompt leaves one row for each stream behind it, so that every stream advances
        in every step, and the prompt in what is left (without chunked prefill it is computed whole instead)."""
        requests = self._running.snapshot()
        num_remaining = [request.num_remaining for request in requests]
        num_streams_behind = num_remaining.count(1)
        for request, remaining in zip(requests, num_remaining, strict=True):
            num_streams_behind -= remaining == 1
            if request.status is RequestStatus.RUNNING:  # else it gave its blocks to one before it
                self._schedule_chunk(request, plan, num_rows_for_others=num_streams_behind)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Who comes back and who is new, in order of precedence."""
        while len(self._running) + len(self._reservations) < self.config.max_num_running:
            queue = self._next_queue()
            request = queue.first()
            if request is None or not self._bring_in(request, plan):
                break  # those behind it must not overtake, or it might wait for ever

    def _next_queue(self) -> RequestQueue:
        swapped, waiting = self._swapped.first(), self._waiting.first()
        if swapped is None or (waiting is not None and waiting.precedence < swapped.precedence):
            return self._waiting
        return self._swapped

    def _bring_in(self, request: Request, plan: StepPlan) -> bool:
        """False when there is no room for it in this step."""
        is_swapped = request.status is RequestStatus.SWAPPED
        if request.wants_remote_kv and not is_swapped:
            return self._reserve(request, plan)
        if not plan.num_rows_left or not self._may_start(request, plan):
            return False
        return self._resume(request, plan) if is_swapped else self._start(request, plan)

    def _may_start(self, request: Request, plan: StepPlan) -> bool:
        """Another prompt may be computed in part, or this one is computed whole."""
        config = self.config
        if config.enable_chunked_prefill and plan.num_partial < config.max_num_partial_prefills:
            return True
        missing = max(request.num_tokens - self.cache.num_kept_tokens(request), 1)
        return missing <= min(plan.num_rows_left, config.max_chunk)

    def _resume(self, request: Request, plan: StepPlan) -> bool:
        copies = self.cache.swap_in(request, request.num_tokens, num_spare_blocks=self._num_spare_blocks())
        if copies is None:
            return False
        self._swapped.remove(request)
        plan.swap_ins.extend(copies)
        plan.resumed.append(request)
        self._run(request)
        self._schedule_chunk(request, plan)
        return True

    def _start(self, request: Request, plan: StepPlan) -> bool:
        is_new = request.num_cached_tokens is None
        if self._admit(request, request.num_tokens) is None:
            return False
        if is_new:
            plan.started.append(request)
        self._run(request)
        self._schedule_chunk(request, plan)
        return True

    def _reserve(self, request: Request, plan: StepPlan) -> bool:
        num_slots = min(request.num_tokens + 1, self.cache.capacity_tokens)
        num_cached = self._admit(request, num_slots)
        if num_cached is None:
            return False
        if request.num_resets_at_start != self.cache.num_resets:
            self.cache.keep_from_cache(request.request_id)  # its KV may have been computed before the reset
        request.num_computed_tokens = min(num_cached, request.num_tokens - 1)
        request.status = RequestStatus.WAITING_FOR_KV
        self._reservations.add(request)
        plan.reserved.append(request)
        return True

    def _admit(self, request: Request, num_slots: int) -> int | None:
        """Gives it its blocks and takes it out of the queue; the number of cached tokens, or None without room."""
        num_cached = self.cache.admit(request, num_slots, num_spare_blocks=self._num_spare_blocks())
        if num_cached is None:
            return None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        self._waiting.remove(request)
        return num_cached

    def _num_spare_blocks(self) -> int:
        """A block for each stream that runs: to take their next block would soon cost a preemption."""
        return sum(1 for running in self._running if not running.is_compute_only)

    def _run(self, request: Request) -> None:
        """From its filled tokens on; at least the last token is computed, since its output is still to come."""
        num_filled = self.cache.num_filled_tokens(request.request_id)
        request.num_computed_tokens = min(num_filled, request.num_tokens - 1)
        request.status = RequestStatus.RUNNING
        self._running.add(request)

    def _schedule_chunk(self, request: Request, plan: StepPlan, *, num_rows_for_others: int = 0) -> None:
        """As many rows as it may have."""
        remaining = request.num_remaining
        if self.config.enable_chunked_prefill:
            count = min(remaining, self.config.max_chunk, plan.num_rows_left - num_rows_for_others)
        else:
            count = remaining if remaining <= plan.num_rows_left else 0
        if count > 0:
            count = self._end_at_block_edge(request, count)
            self._schedule_rows(request, count, plan)
        if remaining > max(count, 1):  # a stream that has to skip the step is no partial prompt
            plan.num_partial += 1

    def _schedule_rows(self, request: Request, count: int, plan: StepPlan) -> None:
        start = request.num_computed_tokens
        end = start + count
        is_recompute = self.cache.num_filled_tokens(request.request_id) >= end
        if not is_recompute and not self._make_writable(request, start, end, plan):
            plan.is_short_of_blocks = True
            return
        plan.num_rows_left -= count
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

    def _end_at_block_edge(self, request: Request, count: int) -> int:
        """A computation's chunk ends at a block edge where it can, so that the block can leave."""
        start, block_size = request.num_computed_tokens, self.cache.block_size
        if not request.is_compute_only or start + count == request.num_tokens:
            return count
        rounded = (start + count) // block_size * block_size - start
        return rounded if rounded > 0 else count

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
            if revoke_until_promised(shortage, plan, self.cache, self._reservations, self._held):
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
        copies = self.cache.swap_out(victim.request_id) if self._prefers_swap(victim) else None
        if copies is None:
            self._requeue(victim, RequestStatus.PREEMPTED)
            return
        self.num_swap_preemptions += 1
        plan.swap_outs.extend(copies)
        victim.status = RequestStatus.SWAPPED
        self._swapped.add(victim)

    def _prefers_swap(self, victim: Request) -> bool:
        if self.config.preemption_mode != "auto":
            return self.config.preemption_mode == "swap"
        num_tokens = victim.num_computed_tokens
        if self.costs.prefers_swap(num_tokens, self.cache.layout.num_blocks_for(num_tokens)):
            return True
        self.costs.swap.fade()
        return False

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

    def forget_swap_outs(self, batch: SchedulerOutput) -> None:
        """The step failed, perhaps before it copied their blocks: what it swapped out is computed again."""
        for request in batch.preempted:
            if request.status is RequestStatus.SWAPPED:
                self._swapped.remove(request)
                self._requeue(request, RequestStatus.PREEMPTED)

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
        elif request.status is RequestStatus.SWAPPED:
            self._swapped.remove(request)
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
        swap_space = self.cache.swap_space
        queued = sum(request.num_tokens for request in waiting if not request.wants_remote_kv)
        return NodeStats(
            num_running=len(running),
            num_waiting=len(waiting),
            num_waiting_for_kv=len(self._reservations),
            num_swapped=len(self._swapped),
            num_queued_tokens=queued + sum(request.num_remaining for request in running),
            num_free_blocks=self.cache.num_free_blocks,
            num_blocks=self.cache.pool.num_usable,
            num_held_blocks=sum(len(self.cache.block_ids(request_id)) for request_id in held),
            num_unused_slots=self.cache.num_unused_slots(),
            num_host_blocks=swap_space.num_blocks,
            num_free_host_blocks=swap_space.num_free,
            prefix_cache_queries=self.cache.num_queried_tokens,
            prefix_cache_hits=self.cache.num_hit_tokens,
            num_preemptions=self.num_preemptions,
            num_swap_preemptions=self.num_swap_preemptions,
        )

    def check_integrity(self) -> None:
        """AssertionError unless queues, tables and pool agree."""
        self.cache.check_integrity()
        queues: list[tuple[RequestStatus, Callable[[Request], bool]]] = [
            (RequestStatus.RUNNING, self._running.__contains__),
            (RequestStatus.WAITING_FOR_KV, self._reservations.__contains__),
            (RequestStatus.SWAPPED, self._swapped.__contains__),
        ]
        for request in self.requests.values():
            for status, is_queued in queues:
                assert (request.status is status) == is_queued(request), f"{request} is in the wrong queue"
            has_blocks = self.cache.has_table(request.request_id)
            assert has_blocks == (request in self._running or request in self._reservations), f"{request}: blocks?"
            is_swapped = request.request_id in self.cache.swap_space
            assert is_swapped == (request.status is RequestStatus.SWAPPED), f"{request}: host blocks?"
