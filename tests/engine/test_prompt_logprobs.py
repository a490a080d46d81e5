"""Log-probabilities of a prompt, computed here, from another node's hidden states, or from both: once, and in order."""

import numpy as np
import pytest

from common.engine.events import FailedEvent, OutputEvent, ReservedEvent, RevokedEvent, ScoredEvent
from common.request import Request, RequestStatus
from common.sampling_params import SamplingParams

MOST_ROWS = 32
"""Hidden states of a step."""


@pytest.fixture
def make_scoring(make_request):
    def make(num_tokens=70, max_tokens=3, **fields):
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0)
        return make_request(num_tokens, params=params, **fields)

    return make


def run(engine, limit=300):
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


def run_until(engine, condition, limit=300):
    """All events, those of the step that made it so included."""
    events = []
    for _ in range(limit):
        events += engine.step()
        if condition():
            return events
    raise AssertionError(f"not so after {limit} steps")


def assert_nothing_held(engine):
    assert not engine.scheduler.requests
    assert not engine.inbox
    assert engine.scheduler.num_held_requests == 0
    assert engine.scheduler.cache.pool.num_used == 0


def assert_scored(events, request, num_from_rows=0):
    """Each token's once, in order, all before an output; those from hidden rows first."""
    own = [event for event in events if event.request_id == request.request_id]
    scored = [event for event in own if isinstance(event, ScoredEvent)]
    values, names = [], {one.request_id for one in (request, *request.choices)}
    for event in scored:
        assert event.start == 1 + len(values)
        values += event.logprobs
    assert [value.logprob for value in values] == [-float(i) for i in range(request.num_prompt_tokens - 1)]
    num_local = len(values) - num_from_rows
    assert [value.rank for value in values] == [1] * num_from_rows + [0] * num_local
    first_output = next(i for i, e in enumerate(events) if isinstance(e, OutputEvent) and e.request_id in names)
    assert events.index(scored[-1]) < first_output


def outputs(events, request):
    return [e.token_id for e in events if isinstance(e, OutputEvent) and e.request_id == request.request_id]


def hidden(start, end):
    """Of the prompt's tokens start .. end - 1: each says which one it is."""
    return np.array([[position, 0] for position in range(start, end)], np.float32)


def add_rows(engine, request, start, end, piece=1000):
    for first in range(start, end, piece):
        engine.add_prompt_hidden(request.request_id, first, hidden(first, min(first + piece, end)))


def reserve(engine, request):
    request.wants_remote_kv = True
    engine.add(request)
    assert [e.request_id for e in engine.step() if isinstance(e, ReservedEvent)] == [request.request_id]


def starts(runner, request):
    return [rows.start for batch in runner.batches for rows in batch.scheduled if rows.request is request]


# --- computed here --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [8, 16, 33])
def test_p07_a_prompt_whose_blocks_are_cached_is_scored_as_before(make_engine, make_scoring, make_request, chunk):
    """There were no logits of the cached part: an assertion, or what the buffer held."""
    engine = make_engine(max_num_batched_tokens=chunk)
    prompt = list(range(33))
    replies = []
    for _ in range(2):
        request = make_scoring(prompt_token_ids=prompt)
        engine.add(request)
        events = run(engine)
        assert_scored(events, request)
        assert request.num_cached_tokens == 0
        replies.append([event.logprobs for event in events if isinstance(event, ScoredEvent)])
        assert max(len(piece) for piece in replies[-1]) == min(chunk, 32)
    assert replies[0] == replies[1]
    other = make_request(prompt_token_ids=prompt)
    engine.add(other)
    run(engine)
    assert other.num_cached_tokens == 32, "scoring filled the cache"
    assert_nothing_held(engine)


def test_a_prompt_of_one_token_has_nothing_to_score(make_engine, make_scoring):
    engine = make_engine()
    request = make_scoring(1)
    engine.add(request)
    events = run(engine)
    assert not [event for event in events if isinstance(event, ScoredEvent)]
    assert outputs(events, request) == [100, 101, 102]


@pytest.mark.parametrize(
    "config", [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "num_host_blocks": 9}]
)
def test_preempted_halfway_no_token_is_scored_twice(make_engine, make_request, make_scoring, config):
    engine = make_engine(num_blocks=8, long_prefill_token_threshold=1, **config)
    stream, request = make_request(8, max_tokens=40), make_scoring(32)
    engine.add(stream)
    engine.add(request)
    events = run_until(engine, lambda: request.num_preemptions)
    assert 1 < request.num_scored_tokens < 32
    events += run(engine)
    assert_scored(events, request)
    assert outputs(events, request) == [100, 101, 102]
    assert_nothing_held(engine)


def test_all_choices_wait_for_the_one_scoring_of_their_prompt(make_engine, make_scoring):
    engine = make_engine(max_num_batched_tokens=8)
    request = make_scoring(20)
    choices = [Request(f"c{i}", request.prompt_token_ids, request.params, choice=i) for i in range(3)]
    request.choices = list(choices)
    engine.add(request)
    events = run_until(engine, lambda: choices[0].output_token_ids)
    assert_scored(events, request)
    events += run(engine)
    assert [outputs(events, choice) for choice in choices] == [[100, 101, 102]] * 3
    assert {e.request_id for e in events if isinstance(e, ScoredEvent)} == {request.request_id}
    assert_nothing_held(engine)


# --- from hidden states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 32, 33, 70])
def test_however_the_rows_come_a_step_takes_as_many_as_it_may(make_engine, make_scoring, runner, piece):
    engine = make_engine()
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, 70, piece)
    engine.adopt("r0", 70)
    events, counts = [], []
    while request.status is RequestStatus.WAITING_FOR_KV and len(counts) < 10:
        new = engine.step()
        counts.append(sum(len(event.logprobs) for event in new if isinstance(event, ScoredEvent)))
        events += new
    assert counts[:3] == [MOST_ROWS, MOST_ROWS, 5], "the rest and the row that gives the output"
    events += run(engine)
    assert_scored(events, request, num_from_rows=69)
    assert outputs(events, request) == [69, 101, 102]
    assert starts(runner, request) == [70, 71], "nothing of the prompt is computed here"
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_tokens", [2, 32, 33, 34, 64, 65])
def test_the_last_row_gives_the_output_wherever_a_slice_ends(make_engine, make_scoring, num_tokens):
    engine = make_engine()
    request = make_scoring(num_tokens, max_tokens=1)
    reserve(engine, request)
    add_rows(engine, request, 0, num_tokens)
    events = run(engine)
    assert_scored(events, request, num_from_rows=num_tokens - 1)
    assert outputs(events, request) == [num_tokens - 1]
    engine.release_reservation("r0")
    assert_nothing_held(engine)


def test_q09_a_long_prompt_is_scored_in_slices_and_streams_go_on(make_engine, make_request, make_scoring):
    """All rows at once took the memory of the whole device."""
    engine = make_engine(max_model_len=2048, num_blocks=300)
    stream = make_request(8, max_tokens=60)
    engine.add(stream)
    engine.step()
    request = make_scoring(1000)
    reserve(engine, request)
    add_rows(engine, request, 0, 1000)
    events = []
    for _ in range(31):
        new = engine.step()
        assert [len(event.logprobs) for event in new if isinstance(event, ScoredEvent)] == [MOST_ROWS]
        assert len(outputs(new, stream)) == 1
        events += new
    engine.adopt("r1", 1000)
    assert_scored(events + run(engine), request, num_from_rows=999)
    assert_nothing_held(engine)


def test_rows_are_used_before_there_are_blocks(make_engine, make_request, make_scoring):
    engine = make_engine(num_blocks=8)
    engine.add(make_request(30, max_tokens=20))
    engine.step()
    request = make_scoring(30, wants_remote_kv=True)
    engine.add(request)
    add_rows(engine, request, 0, 30, piece=9)
    events = engine.step()
    assert request.status is RequestStatus.WAITING
    assert_scored(events, request, num_from_rows=29)
    assert outputs(events, request) == [29]
    events = run(engine)
    assert request.status is RequestStatus.WAITING_FOR_KV
    engine.adopt("r1", 30)
    assert outputs(run(engine), request) == [101, 102]
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_rows", [0, 1, 40, 63, 64, 69])
@pytest.mark.parametrize("num_filled", [0, 8, 64])
def test_a_source_lost_halfway_is_gone_on_for_from_where_its_rows_end(
    make_engine, make_scoring, runner, num_rows, num_filled
):
    engine = make_engine()
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, num_rows, piece=9)
    engine.adopt("r0", num_filled)
    events = run(engine)
    assert_scored(events, request, num_from_rows=num_rows)
    assert starts(runner, request)[0] == min(num_rows, num_filled)
    assert outputs(events, request) == [100, 101, 102]
    assert_nothing_held(engine)


@pytest.mark.parametrize("steps_between", [0, 1, 2])
@pytest.mark.parametrize("piece", [7, 70])
def test_of_a_source_that_begins_anew_only_what_is_new_counts(make_engine, make_scoring, steps_between, piece):
    engine = make_engine()
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, 40, piece)
    events = [event for _ in range(steps_between) for event in engine.step()]
    add_rows(engine, request, 0, 70, piece)
    engine.adopt("r0", 70)
    events += run(engine)
    assert_scored(events, request, num_from_rows=69)
    assert outputs(events, request) == [69, 101, 102]
    assert_nothing_held(engine)


def test_rows_after_a_gap_are_dropped(make_engine, make_scoring):
    engine = make_engine()
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, 10)
    add_rows(engine, request, 11, 70)
    events = run(engine)
    assert request.num_scored_tokens == 11
    assert outputs(events, request) == [], "the last row must not overtake"
    engine.adopt("r0", 70)
    events += run(engine)
    assert_scored(events, request, num_from_rows=10)
    assert_nothing_held(engine)


def test_a_request_that_computes_itself_meanwhile_drops_its_rows(make_engine, make_scoring):
    engine = make_engine(max_num_batched_tokens=16)
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, 70)
    events = engine.step()
    assert request.num_scored_tokens == 1 + MOST_ROWS
    engine.cancel_remote("r0")
    events += engine.step()
    assert request.status is RequestStatus.RUNNING
    assert not engine.inbox
    events += run(engine)
    assert_scored(events, request, num_from_rows=MOST_ROWS)
    assert outputs(events, request) == [100, 101, 102]
    assert_nothing_held(engine)


def test_an_abort_drops_the_rows_that_wait(make_engine, make_scoring):
    engine = make_engine()
    request = make_scoring(70)
    reserve(engine, request)
    add_rows(engine, request, 0, 70)
    engine.adopt("r0", 70)
    assert len(engine.step()) == 1
    engine.abort("r0")
    assert engine.stats().num_held_blocks == 9
    engine.release_reservation("r0")
    assert run(engine) == []
    assert_nothing_held(engine)
    again = make_scoring(70, request_id="r0")
    reserve(engine, again)
    run(engine)
    assert again.status is RequestStatus.WAITING_FOR_KV, "the adoption was the first one's"
    add_rows(engine, again, 0, 70)
    engine.abort("r0")
    engine.release_reservation("r0")
    run(engine)
    assert_nothing_held(engine)


def test_rows_of_two_requests_take_turns_as_they_came(make_engine, make_scoring):
    engine = make_engine()
    first, second = make_scoring(40), make_scoring(50)
    for request in (first, second):
        reserve(engine, request)
    for start in range(0, 50, 10):
        for request in (first, second):
            add_rows(engine, request, start, min(start + 10, request.num_prompt_tokens))
    engine.adopt("r0", 40)
    engine.adopt("r1", 50)
    events = engine.step()
    assert {e.request_id for e in events} == {"r0", "r1"}
    events += run(engine)
    assert_scored(events, first, num_from_rows=39)
    assert_scored(events, second, num_from_rows=49)
    assert (outputs(events, first)[0], outputs(events, second)[0]) == (39, 49)
    assert_nothing_held(engine)


def test_revoked_while_its_rows_wait_its_adoption_gives_the_blocks_back(make_engine, make_request, make_scoring):
    engine = make_engine(num_blocks=13)
    stream, request = make_request(7, max_tokens=60), make_scoring(64)
    engine.add(stream)
    engine.step()
    reserve(engine, request)
    run_until(engine, lambda: len(stream.output_token_ids) == 18)  # it fills its blocks
    add_rows(engine, request, 0, 64)
    engine.adopt("r1", 64)
    events = engine.step()
    assert RevokedEvent("r1") in events
    events += run_until(engine, lambda: request.status is RequestStatus.WAITING)
    assert not stream.is_finished
    assert_scored(events, request, num_from_rows=63)
    events += run(engine)
    assert request.status is RequestStatus.WAITING_FOR_KV, "reserved anew"
    engine.adopt("r1", 64)
    events += run(engine)
    assert outputs(events, request) == [63, 101, 102]
    assert_nothing_held(engine)


def test_a_step_that_fails_over_rows_fails_their_requests_once(make_engine, make_scoring, make_request, runner):
    engine = make_engine()
    first, second = make_scoring(20), make_scoring(20)
    for request in (first, second):
        reserve(engine, request)
    add_rows(engine, first, 0, 10, piece=5)
    runner.error = ValueError("boom")
    assert engine.step() == [FailedEvent("r0", "ValueError: boom")]
    engine.release_reservation("r0")
    add_rows(engine, second, 0, 20)
    engine.adopt("r1", 20)
    assert_scored(run(engine), second, num_from_rows=19)
    assert_nothing_held(engine)


def test_an_adoption_that_follows_its_rows_waits_for_them_in_the_thread(
    make_async_engine, make_scoring, recorder, runner
):
    engine = make_async_engine()
    request = make_scoring(70, wants_remote_kv=True)
    engine.add(request)
    for start in range(0, 70, 10):
        engine.add_prompt_hidden("r0", start, hidden(start, start + 10))
    recorder.wait_for(lambda: recorder.of(ReservedEvent))
    engine.adopt("r0", 70)
    recorder.wait_for_end("r0")
    assert_scored(recorder.events, request, num_from_rows=69)
    assert recorder.tokens("r0") == [69, 101, 102]
    assert starts(runner, request) == [70, 71]
