"""The engine in its thread: commands from other threads, events through the callback, sleep, cancel, end."""

import random
import threading

import numpy as np
import pytest

from common.engine.async_engine import AsyncEngine
from common.engine.events import ComputedEvent, FailedEvent, OutputEvent, ReservedEvent, RevokedEvent
from common.errors import ContextLengthError, UnavailableError


def row(token_id):
    return np.array([token_id, 0], np.float32)


def test_requests_from_several_threads_all_end(make_async_engine, make_request, recorder):
    engine = make_async_engine()
    requests = [make_request(max_tokens=5) for _ in range(24)]
    threads = [threading.Thread(target=list, args=(map(engine.add, requests[i::3]),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.wait_for_end(*(request.request_id for request in requests))
    assert all(recorder.tokens(request.request_id) == [100, 101, 102, 103, 104] for request in requests)


def test_what_can_never_fit_raises_in_the_caller(make_async_engine, make_request):
    engine = make_async_engine()
    with pytest.raises(ContextLengthError, match="maximum context length is 256"):
        engine.add(make_request(300))
    with pytest.raises(ContextLengthError):
        engine.check_fits(make_request(256))
    engine.check_fits(make_request(255))


def test_what_only_the_queue_can_tell_comes_as_an_event(make_async_engine, make_request, recorder, runner):
    runner.gate = threading.Event()
    engine = make_async_engine(max_num_waiting=1, max_num_seqs=1)
    engine.add(make_request())
    assert runner.is_inside.wait(20)
    engine.add(make_request())
    engine.add(make_request())
    runner.gate.set()
    recorder.wait_for(lambda: recorder.of(FailedEvent))
    assert recorder.of(FailedEvent) == [FailedEvent("r2", "1 requests wait, at most 1 may")]
    recorder.wait_for_end("r0", "r1")


def test_an_idle_engine_sleeps(make_async_engine, make_request, recorder, runner, monkeypatch):
    engine = make_async_engine()
    engine.add(make_request())
    recorder.wait_for_end("r0")
    engine.check_integrity()  # a round trip: it went to sleep before or after, and woke up
    schedules = []
    inner = engine._engine
    schedule = inner.schedule
    monkeypatch.setattr(inner, "schedule", lambda: (schedules.append(1), schedule())[1])
    engine.check_integrity()
    engine.check_integrity()
    assert len(schedules) <= 5  # a busy loop would have made thousands
    num_batches = len(runner.batches)
    assert num_batches == 3  # and no empty step reached the runner


def test_an_abort_ends_the_step_in_flight_that_nobody_else_wants(make_async_engine, make_request, recorder, runner):
    runner.gate = threading.Event()  # never opened: only a cancel lets the step go
    engine = make_async_engine()
    engine.add(make_request(20))
    assert runner.is_inside.wait(20)
    engine.abort("r0")
    engine.check_integrity()
    assert runner.num_cancelled >= 1
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert recorder.of(OutputEvent) == []


def test_release_ends_a_computation_in_flight(make_async_engine, make_request, recorder, runner):
    runner.gate = threading.Event()
    engine = make_async_engine()
    engine.add(make_request(20, max_tokens=None))
    assert runner.is_inside.wait(20)
    engine.release("r0")
    engine.check_integrity()
    assert runner.num_cancelled >= 1
    assert recorder.of(ComputedEvent) == []


def test_a_hidden_row_joins_the_step_in_flight(make_async_engine, make_request, recorder, runner):
    engine = make_async_engine()
    engine.add(make_request(20, wants_remote_kv=True))
    recorder.wait_for(lambda: recorder.of(ReservedEvent))
    runner.gate = threading.Event()
    engine.add(make_request(8, max_tokens=1))
    assert runner.is_inside.wait(20)
    engine.add_hidden("r0", row(55))  # the step of r1 is between two layers
    runner.gate.set()
    recorder.wait_for(lambda: recorder.of(OutputEvent, "r0"))
    assert len(runner.batches) == 1
    engine.adopt("r0", 20)
    recorder.wait_for_end("r0", "r1")
    assert recorder.tokens("r0") == [55, 101, 102]


def test_a_hidden_row_wakes_an_idle_engine_and_waits_for_its_add(make_async_engine, make_request, recorder, runner):
    engine = make_async_engine()
    runner.gate = threading.Event()
    engine.add(make_request(8, max_tokens=1))
    assert runner.is_inside.wait(20)
    engine.add(make_request(20, wants_remote_kv=True))  # still in the queue, as is
    engine.add_hidden("r1", row(55))
    runner.gate.set()
    recorder.wait_for(lambda: recorder.of(OutputEvent, "r1"))
    recorder.wait_for(lambda: recorder.of(ReservedEvent))
    engine.cancel_remote("r1")
    recorder.wait_for_end("r1")
    assert recorder.tokens("r1") == [55, 101, 102]


def test_a_hidden_row_that_comes_together_with_adopt_is_not_computed_again(
    make_async_engine, make_request, recorder, runner
):
    engine = make_async_engine()
    engine.add(make_request(20, wants_remote_kv=True))
    recorder.wait_for(lambda: recorder.of(ReservedEvent))
    engine._engine.add_hidden("r0", row(55))  # without waking the thread: the next command finds both
    engine.adopt("r0", 20)
    recorder.wait_for_end("r0")
    assert recorder.tokens("r0") == [55, 101, 102]
    assert [batch.num_scheduled_tokens for batch in runner.batches if batch.scheduled] == [1, 1]


def test_a_reset_of_the_prefix_cache(make_async_engine, make_request, recorder):
    engine = make_async_engine()
    for number in range(3):
        request = make_request(prompt_token_ids=list(range(20)))
        engine.add(request)
        recorder.wait_for_end(request.request_id)
        if number == 1:
            engine.reset_prefix_cache()
    cached = [recorder.of(OutputEvent, f"r{number}")[0].num_cached_tokens for number in range(3)]
    assert cached == [0, 16, 0]


def test_a_receiver_that_raises_does_not_stop_the_engine(make_engine, make_request, caplog):
    seen = threading.Event()

    def receive(events):
        if events[-1].request_id == "r1":
            seen.set()
        raise ValueError("receiver")

    engine = AsyncEngine(make_engine(), receive)
    engine.start()
    engine.add(make_request())
    engine.add(make_request())
    assert seen.wait(20)
    engine.stop(20)
    assert "the receiver of" in caplog.text


def test_a_broken_invariant_ends_the_engine_and_all_hear_of_it(make_async_engine, make_request, recorder, runner):
    runner.gate = threading.Event()
    engine = make_async_engine()
    engine.add(make_request())
    assert runner.is_inside.wait(20)
    engine._engine.scheduler.update = lambda *_: 1 / 0
    runner.gate.set()
    recorder.wait_for(lambda: recorder.of(FailedEvent))
    assert recorder.of(FailedEvent)[0].error == "the engine ended: ZeroDivisionError"
    engine.stop(20)
    assert isinstance(engine.failure, ZeroDivisionError)
    with pytest.raises(UnavailableError):
        engine.add(make_request())


def test_stop_before_start_and_twice(make_engine, recorder):
    engine = AsyncEngine(make_engine(), recorder)
    engine.stop()
    engine.stop()
    assert not engine.is_alive


@pytest.mark.parametrize("seed", range(4))
def test_a_fuzzed_load_on_a_small_pool_always_ends(make_async_engine, make_request, recorder, seed):
    """Streams and remote requests, aborted now and then; the node's side answers each reservation from the callback's
    thread. Nobody hangs, nothing leaks."""
    rng = random.Random(seed)
    engine = make_async_engine(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=24)
    aborted = set()
    record = recorder.__call__

    def answer(events):
        for event in events:
            if isinstance(event, RevokedEvent):
                engine.release_reservation(event.request_id)
            elif isinstance(event, ReservedEvent) and event.request_id not in aborted:
                if rng.random() < 0.8:
                    engine.add_hidden(event.request_id, row(100), num_tokens=None)
                if rng.random() < 0.7:
                    engine.adopt(event.request_id, rng.randint(0, 30))
                else:
                    engine.cancel_remote(event.request_id)
        record(events)

    engine._on_events = answer
    requests = [
        make_request(rng.randint(1, 30), max_tokens=rng.randint(1, 30), wants_remote_kv=rng.random() < 0.4)
        for _ in range(60)
    ]
    for number, request in enumerate(requests):
        engine.add(request)
        if rng.random() < 0.2:
            victim = requests[rng.randint(0, number)].request_id
            aborted.add(victim)
            engine.abort(victim)
            engine.release_reservation(victim)
    recorder.wait_for_end(*(r.request_id for r in requests if r.request_id not in aborted))
    for request_id in aborted:
        engine.abort(request_id)
        engine.release_reservation(request_id)
    for request in requests:
        if request.request_id not in aborted:
            assert recorder.tokens(request.request_id) == [100 + i for i in range(request.params.max_tokens)]
