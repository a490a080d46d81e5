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

from collections.abc import Mapping, Sequence

from common.errors import ConfigError, InvalidRequestError, OverloadedError
from common.messages import NodeStats
from common.request import FinishReason, Request, RequestStatus
from common.scheduling.beam_search import BeamSearch
from common.scheduling.choices import Choices
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager, Write
from common.scheduling.limits import check_fits
from common.scheduling.output import Booked, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from common.scheduling.preemption import PreemptionCosts, revoke_until_promised, youngest_behind
from common.scheduling.queues import Queues, num_sequences
from common.scheduling.stats import measure
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
        self.num_preemptions = 0
        self.num_swap_preemptions = 0
        self._queues = Queues()
        self._choices = Choices(self._queues, cache)
        self._num_added = 0

    @property
    def requests(self) -> Mapping[str, Request]:
        """All that have not finished, by id."""
        return self._queues.requests

    # --- from outside, between steps --------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """See `limits.check_fits`. From any thread."""
        check_fits(self.config, self.cache, request)

    def add(self, request: Request) -> None:
        """Queues it. Raises InvalidRequestError for what can never run, OverloadedError when the queue is full."""
        self.check_fits(request)
        if request.request_id in self.requests or request.request_id in self._queues.held:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        if len(self._queues.waiting) >= self.config.max_num_waiting:
            raise OverloadedError(
                f"{len(self._queues.waiting)} requests wait, at most {self.config.max_num_waiting} may"
            )
        self._num_added += 1
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.precedence = (priority, self._num_added, 0)
        request.num_resets_at_start = self.cache.num_resets
        self._queues.requests[request.request_id] = request
        if request.params is not None and request.params.beam_search is not None:
            request.beam_search = BeamSearch(request.params, request.stop_token_ids, self._max_outputs(request))
        self._choices.add(request)
        if request.wants_cached_only:
            self._queues.lookups.append(request)
        else:
            self._queues.wait(request, RequestStatus.WAITING)

    def _max_outputs(self, request: Request) -> int:
        """The last one needs no slot, it is never computed."""
        return min(self._max_num_tokens, request.max_num_tokens) - request.num_prompt_tokens

    @property
    def _max_num_tokens(self) -> int:
        return min(self.config.max_model_len, self.cache.capacity_tokens + 1)

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
        if (request := self._queues.held.get(request_id)) is not None and request.is_compute_only:
            self._free_held(request_id)

    def adopt(self, request_id: str, num_computed_tokens: int) -> None:
        """KV of the first `num_computed_tokens` tokens is in the reserved blocks: the request runs, and computes the
        rest. A revoked one leaves its KV in the prefix cache and waits again; one that ended gives its blocks back."""
        self._free_held_reservation(request_id)
        request = self.requests.get(request_id)
        if request is None or request not in self._queues.reservations:
            return
        num_slots = len(self.cache.block_ids(request_id)) * self.cache.block_size
        num_filled = min(num_computed_tokens, request.num_tokens, num_slots)
        if request.is_scoring:  # hidden states from there on are computed here
            num_filled = min(num_filled, request.num_scored_tokens - 1)
        self.cache.mark_filled(request, num_filled)
        if self._queues.reservations.take(request):
            self._requeue(request)
            return
        request.wants_remote_kv = False  # if it is preempted, it is computed again here
        self._run(request)

    def release_reservation(self, request_id: str) -> None:
        """The fence: nothing writes into its blocks any more. A live request goes back to its place in the queue."""
        request = self.requests.get(request_id)
        if request is not None and request in self._queues.reservations:
            self._queues.reservations.take(request)
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
        if request.parent is not None or not request.samplers:
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
        for request in self._queues.lookups:
            request.num_cached_tokens = request.num_computed_tokens = self.cache.admit_cached(request)
            plan.started.append(request)
            self._hold(request, FinishReason.STOP)
        self._queues.lookups.clear()

    def _schedule_running(self, plan: StepPlan) -> None:
        """In order of precedence. A long prompt leaves one row for each stream behind it, so that every stream advances
        in every step, and the prompt in what is left (without chunked prefill it is computed whole instead)."""
        for request in self._queues.running.snapshot():
            if request.is_ready_to_fork:
                self._choices.fork(request)
        requests = self._queues.running.snapshot()
        num_remaining = [request.num_remaining for request in requests]
        num_streams_behind = num_remaining.count(1)
        for request, remaining in zip(requests, num_remaining, strict=True):
            num_streams_behind -= remaining == 1
            if request.status is RequestStatus.RUNNING and self._has_room_for_search(request, plan):
                self._schedule_chunk(request, plan, num_rows_for_others=num_streams_behind)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Who comes back and who is new, in order of precedence."""
        if self._queues.first_waiting() is None:
            return
        num_seats = self.config.max_num_running - self._queues.num_seats
        while (request := self._queues.first_waiting()) is not None:
            num_seats -= request.num_sequences
            if num_seats < 0 or not self._bring_in(request, plan):
                break  # those behind it must not overtake, or it might wait for ever

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
        copies = self.cache.swap_in(request, request.num_tokens, num_spare_blocks=self._num_spare_blocks(request))
        if copies is None:
            return False
        self._queues.swapped.remove(request)
        plan.swap_ins.extend(copies)
        plan.resumed.append(request)
        self._run_now(request, plan)
        return True

    def _start(self, request: Request, plan: StepPlan) -> bool:
        is_new = request.num_cached_tokens is None
        if self._admit(request, request.num_tokens) is None:
            return False
        if is_new:
            plan.started.append(request)
        self._run_now(request, plan)
        return True

    def _reserve(self, request: Request, plan: StepPlan) -> bool:
        num_outputs = 0 if request.is_shared_prompt else 1  # choices get blocks of their own
        num_slots = min(request.num_tokens + num_outputs, self.cache.capacity_tokens)
        num_cached = self._admit(request, num_slots)
        if num_cached is None:
            return False
        if request.num_resets_at_start != self.cache.num_resets:
            self.cache.keep_from_cache(request.request_id)  # its KV may have been computed before the reset
        request.num_computed_tokens = min(num_cached, request.num_tokens - 1)
        self._queues.reserve(request)
        plan.reserved.append(request)
        return True

    def _admit(self, request: Request, num_slots: int) -> int | None:
        """Gives it its blocks and takes it out of the queue; the number of cached tokens, or None without room."""
        num_cached = self.cache.admit(request, num_slots, num_spare_blocks=self._num_spare_blocks(request))
        if num_cached is None:
            return None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        self._queues.waiting.remove(request)
        return num_cached

    def _num_spare_blocks(self, request: Request) -> int:
        """What must stay free when it comes in: the first blocks of its choices, and one for each stream that runs,
        since to take their next block would soon cost a preemption."""
        streams = (running for running in self._queues.running if not running.is_compute_only)
        return num_sequences(streams) + self._choices.num_first_blocks(request)

    def _run(self, request: Request) -> None:
        """From its filled tokens on; at least the last token is computed if its output is still to come."""
        num_filled = self.cache.num_filled_tokens(request.request_id)
        request.num_computed_tokens = min(num_filled, request.num_tokens - bool(request.samplers))
        self._queues.run(request)

    def _run_now(self, request: Request, plan: StepPlan) -> None:
        """In this step; a prompt that had been preempted after its first outputs may have nothing left to compute."""
        self._run(request)
        for sequence in self._choices.fork(request) if request.is_ready_to_fork else [request]:
            self._schedule_chunk(sequence, plan)

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
            if not self._make_room([(request.request_id, start, end)], request, plan):
                return False

    def _has_room_for_search(self, request: Request, plan: StepPlan) -> bool:
        """Beams go on together: the first one makes room for what all of them write in this step."""
        prompt = request.parent
        if prompt is None or prompt.beam_search is None:
            return True
        if prompt.request_id not in plan.searches:
            plan.searches[prompt.request_id] = self._make_room_for_beams(prompt.choices, plan)
        return plan.searches[prompt.request_id]

    def _make_room_for_beams(self, beams: Sequence[Request], plan: StepPlan) -> bool:
        last = max(beams, key=lambda beam: beam.precedence)
        writes = [(beam.request_id, beam.num_computed_tokens, beam.num_tokens) for beam in beams]
        while self.cache.num_missing_blocks(writes) > self.cache.num_free_blocks:
            if not self._make_room(writes, last, plan):
                plan.is_short_of_blocks = True
                return False
        return True

    def _make_room(self, writes: Sequence[Write], request: Request, plan: StepPlan) -> bool:
        """Frees blocks for these writes, perhaps fewer than are missing; False when nobody behind `request` has any."""
        shortage = self.cache.num_missing_blocks(writes) - self.cache.num_free_blocks
        if revoke_until_promised(shortage, plan, self.cache, self._queues.reservations, self._queues.held):
            return False
        victim = youngest_behind(request, self._queues.running)
        if victim is None:
            return False
        self._preempt(victim, plan)
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        prompt = victim.parent if victim.search is not None else None
        if prompt is None:
            copies = self.cache.swap_out(victim.request_id) if self._prefers_swap(victim) else None
            self._queues.running.remove(victim)
        else:  # all beams or none
            victim, copies = prompt, None
            self._choices.withdraw(prompt)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(victim)
        if copies is None:
            self._requeue(victim, RequestStatus.PREEMPTED)
            return
        self.num_swap_preemptions += 1
        plan.swap_outs.extend(copies)
        self._queues.swap(victim)

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
        self._queues.wait(request, status)

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, batch: SchedulerOutput, result: StepResult) -> Booked:
        """Books what a step computed. A cancelled step changes nothing."""
        booked = Booked()
        if result.is_cancelled:
            return booked
        for scored in result.scored:
            scored.request.num_scored_tokens = scored.start + len(scored.logprobs)
        for rows in batch.scheduled:
            rows.request.num_computed_tokens = rows.start + rows.num_tokens
            self.cache.mark_filled(rows.request, rows.request.num_computed_tokens)
            if rows.is_last_chunk and rows.request.is_compute_only:
                self._finish(rows.request, FinishReason.STOP)
        for request_id, token in result.sampled.items():
            request = self.requests.get(request_id)
            if request is not None and request.search is not None:
                self._take_candidates(request, token, booked)
            elif request is not None:
                self._append(request, token)
                booked.outputs.append((request, token))
        return booked

    def _append(self, request: Request, token: SampledToken) -> None:
        if request.num_cached_tokens is None and request.parent is not None:
            request.num_cached_tokens = request.parent.num_cached_tokens
        request.append_output(token.token_id)
        if (reason := apply_stop_rules(request, self._max_num_tokens)) is not None:
            self._finish(request, reason)

    def _take_candidates(self, beam: Request, token: SampledToken, booked: Booked) -> None:
        beam.candidates = token.logprobs
        prompt = beam.parent or beam
        if not self._choices.advance(prompt):
            self._finish(prompt, FinishReason.STOP)
            booked.searches.append(prompt)

    def fail(self, request: Request) -> Request | None:
        """Its step failed: it ends. Returns what ended, None if that had ended before; a beam ends its search."""
        if request.search is not None and request.parent is not None:
            request = request.parent
        if request.request_id not in self.requests:
            return None
        self._finish(request, FinishReason.ERROR)
        return request

    def forget_swap_outs(self, batch: SchedulerOutput) -> None:
        """The step failed, perhaps before it copied their blocks: what it swapped out is computed again."""
        for request in batch.preempted:
            if request.status is RequestStatus.SWAPPED:
                self._queues.swapped.remove(request)
                self._requeue(request, RequestStatus.PREEMPTED)

    # --- the end of a request ---------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """It ends, with its choices; the last choice ends its prompt."""
        choices, request.choices = request.choices, []
        for ended in (*choices, request):
            self._finish_alone(ended, reason)
        if (prompt := self._choices.leave(request)) is not None:
            self._finish(prompt, reason)

    def _finish_alone(self, request: Request, reason: FinishReason) -> None:
        """Takes it out of every queue. Blocks that another node may still read or write are held."""
        is_held = request in self._queues.reservations or (request.is_compute_only and reason is not FinishReason.ABORT)
        self._queues.remove(request)
        if is_held:
            self._hold(request, reason)
        else:
            self.cache.free(request.request_id)
            self._end(request, reason)

    def _hold(self, request: Request, reason: FinishReason) -> None:
        self._queues.held[request.request_id] = request
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._queues.requests[request.request_id]

    def _free_held_reservation(self, request_id: str) -> None:
        if (request := self._queues.held.get(request_id)) is not None and not request.is_compute_only:
            self._free_held(request_id)

    def _free_held(self, request_id: str) -> None:
        del self._queues.held[request_id]
        self.cache.free(request_id)

    # --- what others may know ---------------------------------------------------------------------------------------

    @property
    def num_held_requests(self) -> int:
        return len(self._queues.held)

    def stats(self) -> NodeStats:
        """Load now and counters; may be called from any thread (each number is right, all together nearly so)."""
        return measure(self._queues, self.cache, self.num_preemptions, self.num_swap_preemptions)

    def check_integrity(self) -> None:
        """AssertionError unless queues, tables and pool agree."""
        self.cache.check_integrity()
        self._queues.check_integrity(self.cache)
