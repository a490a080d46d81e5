"""The engine's three beats and its events, with a scripted runner."""

import threading

import numpy as np
import pytest

from common.engine.events import (
    BlocksFilledEvent,
    ComputedEvent,
    ComputeStartedEvent,
    FailedEvent,
    HiddenEvent,
    OutputEvent,
    ReservedEvent,
    RevokedEvent,
)
from common.request import FinishReason, RequestStatus
from common.sampling_params import SamplingParams
from common.scheduling.output import StepResult


def run(engine, limit=200):
    """Steps until nothing is left to do; all events."""
    events = []
    for _ in range(limit):
        batch, new = engine.schedule()
        events += new
        if batch.is_idle and not engine.inbox:
            engine.scheduler.check_integrity()
            return events
        events += engine.execute(batch)
    raise AssertionError(f"not done after {limit} steps")


def outputs(events):
    return [event for event in events if isinstance(event, OutputEvent)]


def assert_nothing_held(engine):
    assert not engine.scheduler.requests
    assert engine.scheduler.cache.pool.num_used == 0


def test_outputs_come_in_order_and_the_last_has_the_reason(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request(max_tokens=3))
    events = run(engine)
    assert events[0] == ComputeStartedEvent("r0", 0)
    assert [(e.index, e.token_id, e.finish_reason) for e in outputs(events)] == [
        (0, 100, None),
        (1, 101, None),
        (2, 102, FinishReason.LENGTH),
    ]
    assert outputs(events)[0].num_cached_tokens == 0
    assert_nothing_held(engine)


def test_a_resumed_request_goes_on_at_its_next_index(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request(max_tokens=5, output_token_ids=[7, 8]))
    assert [(e.index, e.token_id) for e in outputs(run(engine))] == [(2, 102), (3, 103), (4, 104)]


@pytest.mark.parametrize(
    ("params", "stop_token_ids", "token_ids", "reason", "stop_reason"),
    [
        ({}, {2}, [5, 2], FinishReason.STOP, None),  # the model's end token
        ({"stop_token_ids": (9,)}, {2, 9}, [5, 9], FinishReason.STOP, 9),  # the user's
        ({"ignore_eos": True}, (), [5, 2, 5, 2], FinishReason.LENGTH, None),
        ({"max_tokens": 2}, {2}, [5, 2], FinishReason.STOP, None),  # both at once: it did stop
    ],
)
def test_stop_rules(make_engine, make_request, runner, params, stop_token_ids, token_ids, reason, stop_reason):
    engine = make_engine()
    runner.scripts["r0"] = [5, 2, 5, 2] if stop_reason is None else [5, 9]
    params = SamplingParams(**({"max_tokens": 4} | params))
    engine.add(make_request(params=params, stop_token_ids=frozenset(stop_token_ids)))
    events = outputs(run(engine))
    assert [event.token_id for event in events] == token_ids
    assert (events[-1].finish_reason, events[-1].stop_reason) == (reason, stop_reason)
    assert_nothing_held(engine)


def test_max_num_tokens_of_a_request_ends_it(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request(8, max_tokens=50, max_num_tokens=11))
    assert [event.finish_reason for event in outputs(run(engine))] == [None, None, FinishReason.LENGTH]


# --- computations ---------------------------------------------------------------------------------------------------


def test_a_computation_tells_each_chunk_and_its_last_hidden_row(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=20)
    engine.add(make_request(45, max_tokens=None))
    events = run(engine)
    table = tuple(engine.scheduler.cache.block_ids("r0"))
    assert [e for e in events if not isinstance(e, HiddenEvent)] == [
        ComputeStartedEvent("r0", 0),
        BlocksFilledEvent("r0", 0, table[0:2], 16),
        BlocksFilledEvent("r0", 2, table[2:4], 32),
        BlocksFilledEvent("r0", 4, table[4:6], 45),
        ComputedEvent("r0"),
    ]
    [hidden] = [e for e in events if isinstance(e, HiddenEvent)]
    assert hidden.rows.shape == (1, 2)
    engine.release("r0")
    assert_nothing_held(engine)


def test_every_block_is_told_once_with_small_chunks(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=3)
    engine.add(make_request(21, max_tokens=None))
    filled = [e for e in run(engine) if isinstance(e, BlocksFilledEvent)]
    assert [e.num_computed_tokens for e in filled] == [3, 6, 8, 11, 14, 16, 19, 21]
    assert [(e.first_block, len(e.block_ids)) for e in filled if e.block_ids] == [(0, 1), (1, 1), (2, 1)]
    engine.release("r0")


def test_cached_blocks_are_told_before_anything_is_computed(make_engine, make_request, runner):
    engine = make_engine()
    prompt = list(range(28))
    engine.add(make_request(prompt_token_ids=prompt[:16], max_tokens=None))
    run(engine)
    engine.add(make_request(prompt_token_ids=prompt, max_tokens=None))
    batch, events = engine.schedule()
    shared = tuple(engine.scheduler.cache.block_ids("r0"))
    assert events == [ComputeStartedEvent("r1", 16), BlocksFilledEvent("r1", 0, shared, 16)]
    table = tuple(engine.scheduler.cache.block_ids("r1"))
    assert engine.execute(batch)[0] == BlocksFilledEvent("r1", 2, table[2:], 28)
    for request_id in ("r0", "r1"):
        engine.release(request_id)
    assert_nothing_held(engine)


def test_a_full_hit_tells_each_block_once(make_engine, make_request):
    engine = make_engine()
    prompt = list(range(24))
    engine.add(make_request(prompt_token_ids=prompt, max_tokens=None))
    run(engine)
    engine.add(make_request(prompt_token_ids=prompt, max_tokens=None))
    events = [e for e in run(engine) if not isinstance(e, HiddenEvent)]
    table = tuple(engine.scheduler.cache.block_ids("r0"))
    assert events == [
        ComputeStartedEvent("r1", 24),
        BlocksFilledEvent("r1", 0, table, 24),
        BlocksFilledEvent("r1", 3, (), 24),
        ComputedEvent("r1"),
    ]
    engine.release("r0")
    engine.release("r1")


def test_all_hidden_rows_come_chunk_by_chunk(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add(make_request(20, max_tokens=None, want_all_hidden=True))
    rows = [e.rows.shape[0] for e in run(engine) if isinstance(e, HiddenEvent)]
    assert rows == [16, 4]
    engine.release("r0")


def test_a_lookup_answers_without_a_step_of_the_runner(make_engine, make_request, runner):
    engine = make_engine()
    engine.add(make_request(10, max_tokens=None, wants_cached_only=True))
    assert engine.step() == [ComputeStartedEvent("r0", 0), ComputedEvent("r0")]
    assert runner.batches == []
    engine.release("r0")
    assert_nothing_held(engine)


# --- another node's KV ----------------------------------------------------------------------------------------------


def reserve(engine, make_request, **fields):
    request = make_request(20, wants_remote_kv=True, **fields)
    engine.add(request)
    [reserved] = [event for event in engine.step() if isinstance(event, ReservedEvent)]
    assert reserved == ReservedEvent(request.request_id, 0, tuple(engine.scheduler.cache.block_ids(request.request_id)))
    return request


def row(token_id):
    return np.array([token_id, 0], np.float32)


def test_output_0_from_a_hidden_row_before_the_blocks_are_in(make_engine, make_request, runner):
    engine = make_engine()
    request = reserve(engine, make_request)
    assert engine.add_hidden("r0", row(55))
    [event] = engine.step()
    assert (event.index, event.token_id) == (0, 55)
    assert request.status is RequestStatus.WAITING_FOR_KV
    engine.adopt("r0", 20)
    [event] = engine.step()
    assert (event.index, event.token_id) == (1, 101)
    assert runner.batches[-1].scheduled[0].start == 20
    run(engine)
    assert_nothing_held(engine)


def test_a_hidden_row_joins_a_step_of_others(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request(max_tokens=9))
    engine.step()
    request = make_request(20, wants_remote_kv=True)
    engine.add(request)
    engine.step()
    engine.add_hidden("r1", row(55))
    assert [(e.request_id, e.token_id) for e in engine.step()] == [("r1", 55), ("r0", 102)]


def test_a_repeated_or_late_row_gives_no_second_output(make_engine, make_request):
    engine = make_engine()
    reserve(engine, make_request)
    engine.add_hidden("r0", row(55))
    engine.add_hidden("r0", row(56))
    assert [e.token_id for e in engine.step()] == [55]
    engine.add_hidden("r0", row(57))
    assert engine.step() == []
    engine.add_hidden("r0", row(58), num_tokens=21)  # names the token it stands for: output 1
    assert [(e.index, e.token_id) for e in engine.step()] == [(1, 58)]
    assert not engine.add_hidden("nobody", row(1))


def test_finished_at_output_0(make_engine, make_request):
    engine = make_engine()
    reserve(engine, make_request, max_tokens=1)
    engine.add_hidden("r0", row(55))
    [event] = engine.step()
    assert event.finish_reason is FinishReason.LENGTH
    assert engine.stats().num_held_blocks == 3
    engine.release_reservation("r0")
    assert_nothing_held(engine)


def test_a_revocation_is_told_before_the_step(make_engine, make_request):
    engine = make_engine(num_blocks=6)
    engine.add(make_request(7, max_tokens=20))
    engine.step()
    reserve(engine, make_request)
    events = []
    while not any(isinstance(e, RevokedEvent) for e in events):
        events = engine.step()
    assert events == [RevokedEvent("r1")]
    engine.release_reservation("r1")
    run(engine)
    engine.abort("r1")  # it had been reserved anew
    engine.release_reservation("r1")
    assert_nothing_held(engine)


# --- when things go wrong -------------------------------------------------------------------------------------------


def test_a_runner_that_raises_fails_its_step_and_no_other(make_engine, make_request, runner, caplog):
    engine = make_engine()
    engine.add(make_request(8))
    engine.add(make_request(8))
    engine.step()
    reserve(engine, make_request)
    engine.add_hidden("r2", row(55))
    runner.error = ValueError("boom")
    events = engine.step()
    assert events == [FailedEvent(i, "ValueError: boom") for i in ("r0", "r1", "r2")]
    assert "a step of 2 requests failed" in caplog.text
    engine.release_reservation("r2")
    assert_nothing_held(engine)
    engine.add(make_request(8))
    assert len(outputs(run(engine))) == 3


def test_a_failed_computation_stays_pinned_until_released(make_engine, make_request, runner):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add(make_request(30, max_tokens=None))
    engine.step()
    runner.error = ValueError("boom")
    assert engine.step() == [FailedEvent("r0", "ValueError: boom")]
    assert engine.stats().num_held_blocks == 4
    engine.release("r0")
    assert_nothing_held(engine)


def test_an_output_that_the_runner_owes_fails_the_step(make_engine, make_request, runner, monkeypatch):
    engine = make_engine()
    engine.add(make_request())
    monkeypatch.setattr(runner, "execute", lambda *_: StepResult())
    [_, failed] = engine.step()
    assert isinstance(failed, FailedEvent)
    assert "gave nothing for" in failed.error
    assert_nothing_held(engine)


def test_a_cancelled_step_counts_as_not_computed(make_engine, make_request, runner):
    engine = make_engine()
    request = make_request(8)
    engine.add(request)
    engine.step()
    reserve(engine, make_request)
    runner.gate = threading.Event()
    engine.mark_unwanted("r0")
    before = request.num_computed_tokens
    engine.add_hidden("r1", row(55))
    assert engine.step() == []  # left between two layers
    assert request.num_computed_tokens == before
    runner.gate = None
    engine.abort("r0")
    assert [e.token_id for e in engine.step()] == [55]  # the row waited
    engine.abort("r1")
    engine.release_reservation("r1")
    assert_nothing_held(engine)


def test_a_step_that_somebody_wants_is_not_cancelled(make_engine, make_request, runner):
    engine = make_engine()
    engine.add(make_request(8))
    engine.add(make_request(8))
    asked = []
    execute = runner.execute

    def ask(batch, inbox, should_cancel):
        asked.append(should_cancel())
        return execute(batch, inbox, should_cancel)

    runner.execute = ask
    engine.mark_unwanted("r0")
    engine.step()
    engine.mark_unwanted("r1")
    engine.step()
    assert asked == [False, True]


def refuse(runner, request_id):
    """The runner has a reason instead of an output for this request."""
    execute = runner.execute

    def refusing(batch, inbox, should_cancel):
        result = execute(batch, inbox, should_cancel)
        sampled = {name: token for name, token in result.sampled.items() if name != request_id}
        return StepResult(sampled, result.hidden, failed={request_id: "no token may follow"})

    runner.execute = refusing


def test_a_request_with_a_reason_instead_of_an_output_ends_alone(make_engine, make_request, runner):
    engine = make_engine()
    engine.add(make_request(8))
    engine.add(make_request(8))
    refuse(runner, "r0")
    events = engine.step()
    assert FailedEvent("r0", "no token may follow") in events
    assert [(e.request_id, e.token_id) for e in outputs(events)] == [("r1", 100)]
    assert len(outputs(run(engine))) == 2
    assert_nothing_held(engine)


def test_a_reason_instead_of_an_output_leaves_a_reservation_to_its_fetch(make_engine, make_request, runner):
    engine = make_engine()
    reserve(engine, make_request)
    refuse(runner, "r0")
    engine.add_hidden("r0", row(55))
    assert engine.step() == [FailedEvent("r0", "no token may follow")]
    assert engine.stats().num_held_blocks > 0
    engine.release_reservation("r0")
    assert_nothing_held(engine)
