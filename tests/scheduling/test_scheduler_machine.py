"""The scheduler under everything that can happen to it, in any order, on a shadow memory.

Streams, computations, lookups and remote requests come, are aborted, adopted, revoked, released at any time, on a pool
so small that blocks are always short. After every step the books agree and somebody advances; in the end everybody ends
with the outputs of an unpressured run, and nothing is held.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.request import FinishReason, Request, RequestStatus
from common.sampling_params import BeamSearchParams, SamplingParams
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import HiddenRow
from common.scheduling.scheduler import Scheduler

prompts = st.builds(lambda head, tail: [1] * head + tail, st.integers(0, 26), st.lists(st.integers(0, 2), max_size=9))


class Rows:
    """An inbox of rows that are there when the step polls."""

    def __init__(self, rows):
        self.rows = rows

    def take_prompt_rows(self):
        return []

    def take(self):
        rows, self.rows = self.rows, []
        return rows


class SchedulerMachine(RuleBasedStateMachine):
    num_rules_run = 0

    def __init__(self, make_runner, layout):
        super().__init__()
        self.make_runner, self.layout = make_runner, layout
        self.known: dict[str, Request] = {}
        self.fetching: dict[str, tuple[int, list[int]]] = {}  # cached tokens, blocks: may be written until the fence
        self.started: set[str] = set()
        self.serving: set[str] = set()  # computations that were started and not released

    @initialize(
        mode=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        num_host_blocks=st.sampled_from([2, 5, 16]),
        is_chunked=st.sampled_from([True, True, True, False]),
        threshold=st.sampled_from([0, 0, 5]),
        max_partial=st.sampled_from([1, 4]),
        policy=st.sampled_from(["priority", "priority", "fcfs"]),
        is_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, mode, num_host_blocks, is_chunked, threshold, max_partial, policy, is_caching):
        config = SchedulerConfig(
            max_num_batched_tokens=12 if is_chunked else 64,
            max_num_seqs=5,
            max_model_len=64,
            enable_chunked_prefill=is_chunked,
            long_prefill_token_threshold=threshold if is_chunked else 0,
            max_num_partial_prefills=max_partial,
            scheduling_policy=policy,
            preemption_mode=mode,
        )
        cache = KVCacheManager(  # 8 usable blocks, 64 tokens
            self.layout, 9, enable_prefix_caching=is_caching, num_host_blocks=num_host_blocks
        )
        self.scheduler = Scheduler(config, cache)
        self.runner = self.make_runner(self.scheduler)

    # --- what comes -------------------------------------------------------------------------------------------------

    def add(self, prompt, **fields):
        request = Request(f"r{len(self.known)}", prompt or [0], **fields)
        self.scheduler.add(request)
        self.known |= {one.request_id: one for one in (request, *request.choices)}
        return request

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, -1]),
        salt=st.sampled_from(["", "", "s"]),
        remote=st.booleans(),
        scores=st.sampled_from([None, None, 0]),
    )
    def add_stream(self, prompt, max_tokens, priority, salt, remote, scores):
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=scores)
        self.add(prompt, params=params, priority=priority, cache_salt=salt, wants_remote_kv=remote)

    @rule(prompt=prompts, count=st.integers(2, 4), max_tokens=st.integers(1, 30), remote=st.booleans())
    def add_samples(self, prompt, count, max_tokens, remote):
        """Each choice with a length of its own: they end at different steps."""
        name, prompt = f"r{len(self.known)}", (prompt or [0])[:32]
        choices = [
            Request(f"{name}/{i}", prompt, SamplingParams(max_tokens=1 + (max_tokens + 7 * i) % 30), choice=i)
            for i in range(count)
        ]
        self.add(prompt, params=choices[0].params, choices=choices, wants_remote_kv=remote)

    @rule(prompt=prompts, width=st.integers(1, 3), max_tokens=st.integers(1, 14), remote=st.booleans())
    def add_beams(self, prompt, width, max_tokens, remote):
        params = SamplingParams(max_tokens=max_tokens, beam_search=BeamSearchParams(width=width))
        prompt = (prompt or [0])[: max(1, 22 - max_tokens if width < 3 else 14 - max_tokens)]
        limit = len(prompt) + max_tokens
        self.add(prompt, params=params, max_num_tokens=limit, wants_remote_kv=remote)

    @rule(prompt=prompts, max_tokens=st.integers(10, 30))
    def crowd(self, prompt, max_tokens):
        """A stream that grows beside a parked fetch."""
        for remote in (False, True):
            params = SamplingParams(max_tokens=max_tokens)
            self.add(prompt[:9], params=params, wants_remote_kv=remote)
        self.steps(max_tokens - 2)

    @rule(prompt=prompts, all_hidden=st.booleans())
    def add_computation(self, prompt, all_hidden):
        self.serving.add(self.add(prompt, want_all_hidden=all_hidden).request_id)

    @rule(prompt=prompts)
    def add_lookup(self, prompt):
        self.serving.add(self.add(prompt, wants_cached_only=True).request_id)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        if request_id in self.serving:
            self.scheduler.release(request_id)
            self.serving.discard(request_id)
        else:
            self.scheduler.abort(request_id)

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    # --- steps ------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def step_with_hidden_row(self, data):
        """A hidden row of any live request joins, even when its fetch is long revoked."""
        request = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        is_accepted = self.scheduler.accepts_hidden(request.request_id, request.num_tokens) is not None
        if is_accepted and request.wants_remote_kv and not request.is_scoring:
            digest = self.runner.digests(request.all_token_ids, request.cache_salt)[-1]
            self.one_step([HiddenRow(request, [digest])])

    def one_step(self, rows=()):
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        accepted = [
            row for row in rows if self.scheduler.accepts_hidden(row.request.request_id, row.request.num_tokens)
        ]
        result = self.runner.execute(batch, Rows(accepted), lambda: False)
        self.scheduler.update(batch, result)
        for request in batch.started:
            assert request.request_id not in self.started, "started twice"
            self.started.add(request.request_id)
        for request in batch.reserved:
            cache, request_id = self.scheduler.cache, request.request_id
            self.fetching[request_id] = (cache.num_filled_tokens(request_id), list(cache.block_ids(request_id)))
        if batch.is_idle and self.scheduler.requests:
            assert self.fetching or self.serving, f"nobody advances: {self.scheduler.requests}"
        return batch

    # --- the fetching side ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), end=st.integers(1, 40))
    def receive_some(self, data, end):
        self.receive(data.draw(st.sampled_from(sorted(self.fetching))), end)

    def receive(self, request_id, end):
        """Writes into granted blocks, whatever became of the request; returns how far its KV is in."""
        num_cached, block_ids = self.fetching[request_id]
        end = min(end, self.known[request_id].num_tokens, len(block_ids) * 8)
        for block_id in block_ids[num_cached // 8 :]:
            assert self.scheduler.cache.pool.ref_count(block_id) == 1, "others use a block that is being written"
        self.runner.fetch(self.known[request_id], block_ids, num_cached, end)
        return end

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), end=st.integers(0, 40))
    def adopt(self, data, end):
        request_id = data.draw(st.sampled_from(sorted(self.fetching)))
        request = self.known[request_id]
        end = self.receive(request_id, end)
        del self.fetching[request_id]
        if request.is_finished:
            self.scheduler.release_reservation(request_id)
        else:
            self.scheduler.adopt(request_id, end)

    @precondition(lambda self: self.fetching)
    @rule(data=st.data())
    def release_reservation(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.fetching)))
        del self.fetching[request_id]
        self.scheduler.release_reservation(request_id)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel_remote(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        if request_id not in self.fetching:
            self.scheduler.cancel_remote(request_id)

    # --- always, and at the end -------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self):
        type(self).num_rules_run += 1
        self.scheduler.check_integrity()
        self.scheduler.cache.check_counts()
        stats = self.scheduler.stats()
        live = list(self.scheduler.requests.values())
        assert {r for r in self.known.values() if not r.is_finished} <= set(live)
        assert stats.num_running == num_sequences(live, RequestStatus.RUNNING)
        assert stats.num_waiting_for_kv == num_sequences(live, RequestStatus.WAITING_FOR_KV)
        assert stats.num_swapped == num_sequences(live, RequestStatus.SWAPPED)
        assert stats.num_waiting == num_sequences(live, RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert 0 <= stats.num_unused_slots <= 8 * (stats.num_blocks - stats.num_free_blocks)
        assert stats.num_running + stats.num_waiting_for_kv <= 5
        assert all(request.num_computed_tokens <= request.num_tokens for request in live)
        assert not any(self.known[request_id].num_preemptions for request_id in self.serving)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return  # the example ended before its first rule
        for _ in range(3000):
            if not self.scheduler.requests and not self.fetching:
                break
            if self.one_step().is_idle:  # as late as can be: everybody else is stuck
                for request_id in list(self.fetching):
                    self.finish_fetch(request_id)
            for request_id in [i for i in self.serving if self.known[i].is_finished]:
                self.scheduler.release(request_id)
                self.serving.discard(request_id)
        assert not self.scheduler.requests, f"somebody starves: {self.scheduler.requests}"
        for request_id in self.serving:
            self.scheduler.release(request_id)
        assert self.scheduler.num_held_requests == 0
        assert self.scheduler.cache.pool.num_used == 0
        assert self.scheduler.cache.swap_space.num_free == self.scheduler.cache.swap_space.num_blocks
        self.scheduler.check_integrity()
        self.check_outputs()

    def finish_fetch(self, request_id):
        del self.fetching[request_id]
        if self.known[request_id].is_finished:
            self.scheduler.release_reservation(request_id)
        else:
            self.scheduler.adopt(request_id, 0)

    def check_outputs(self):
        for request in self.known.values():
            if request.params is None or request.params.beam_search is not None:
                self.check_beams(request)
                continue
            outputs, salt = request.output_token_ids, request.cache_salt
            assert outputs == self.runner.expected_outputs(request.prompt_token_ids, len(outputs), salt, request.choice)
            if request.params.prompt_logprobs is not None and outputs:
                assert request.num_scored_tokens == request.num_prompt_tokens
            if f"{request.request_id}/0" in self.known:
                continue  # its choices have the outputs
            if request.finish_reason is not FinishReason.ABORT:
                assert request.finish_reason is FinishReason.LENGTH
                assert len(outputs) == min(request.params.max_tokens, 64 - request.num_prompt_tokens)

    def check_beams(self, request):
        if request.params is not None and request.finish_reason is FinishReason.STOP:
            search = request.beam_search
            assert search.results(search.width) == self.runner.expected_beams(request, request.params.max_tokens)


def num_sequences(requests, *statuses):
    return sum(r.num_sequences for r in requests if r.status in statuses and not r.wants_cached_only)


@pytest.mark.parametrize(
    ("examples", "num_rules"),
    [
        pytest.param(400, 10_000, id="fast"),
        pytest.param(8000, 150_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_machine(make_runner, make_scheduler, examples, num_rules):
    layout = make_scheduler().cache.layout
    SchedulerMachine.num_rules_run = 0
    run_state_machine_as_test(
        lambda: SchedulerMachine(make_runner, layout),
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )
    assert SchedulerMachine.num_rules_run >= num_rules
