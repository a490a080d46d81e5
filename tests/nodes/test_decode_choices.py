"""A decode node and requests for several answers: samples, beams, and the log-probabilities of their prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from common import messages as m
from common.engine.events import FailedEvent, OutputEvent, ReservedEvent, ScoredEvent, SearchEndedEvent
from common.request import FinishReason, Request
from common.sampling_params import BeamSearchParams, SamplingParams
from common.scheduling.beam_search import BeamSearch
from common.structured_output import StructuredOutput
from tests.nodes.scripted_scene import PROXY, Scene, drained

SOURCE = m.Source("p", ["tcp://127.0.0.1:1"])


def so_far(*outputs: Sequence[int]) -> list[m.ChoiceSoFar]:
    """Choices 0, 1, ... with these outputs."""
    return [m.ChoiceSoFar(choice, list(ids)) for choice, ids in enumerate(outputs)]


def told(outputs: Sequence[m.RequestOutput]) -> list[tuple[int, int, list[int], str | None]]:
    return [(o.choice, o.index, o.token_ids, o.finish_reason) for o in outputs]


def scored(scene: Scene, start: int, count: int, engine_id: str = "r#1") -> None:
    logprobs = [m.TokenLogprobs(-float(start + i)) for i in range(count)]
    scene.node.engine_events([ScoredEvent(engine_id, start, logprobs)])


def resent(scene: Scene, choice: int, from_index: int, leg: int = 1) -> list[m.RequestOutput]:
    before = len(scene.emitted())
    scene.node.received(PROXY, m.Resend(request_id="r", leg=leg, choice=choice, from_index=from_index))
    return scene.emitted()[before:]


# --- what the engine is given ---------------------------------------------------------------------------------------


async def test_choices_without_outputs_are_one_request_that_forks() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], []), params=SamplingParams(seed=7, max_tokens=4), cache_salt="s", priority=3)
    prompt = scene.engine.requests["r#1"]
    assert [(one.request_id, one.choice) for one in prompt.choices] == [("r#1/0", 0), ("r#1/1", 1), ("r#1/2", 2)]
    for one in (prompt, *prompt.choices):
        assert (one.prompt_token_ids, one.params.seed, one.cache_salt, one.priority) == ([5, 6, 7], 7, "s", 3)
        assert (one.stop_token_ids, one.max_num_tokens) == ({2}, 7)
    assert scene.sent == [m.Accepted(request_id="r", leg=1)]


async def test_choices_with_outputs_are_requests_of_their_own() -> None:
    scene = Scene()
    scene.decode(choices=so_far([3], [4, 8]))
    assert {name: one.all_token_ids for name, one in scene.engine.requests.items()} == {
        "r#1/0": [5, 6, 7, 3],
        "r#1/1": [5, 6, 7, 4, 8],
    }
    assert not any(one.choices for one in scene.engine.requests.values())
    scene.output(9, engine_id="r#1/1")
    assert told(scene.emitted()) == [(1, 2, [9], None)]


async def test_some_have_outputs_and_some_do_not() -> None:
    scene = Scene()
    scene.decode(choices=so_far([3], [], [4, 8], []), sources=[SOURCE])
    assert [one.choice for one in scene.engine.requests["r#1"].choices] == [1, 3]
    assert len(scene.fetches) == 3, "the prompt's once, and with the outputs of each that has some"
    scene.output(9, engine_id="r#1/3")
    scene.output(9, engine_id="r#1/2")
    assert told(scene.emitted()) == [(3, 0, [9], None), (2, 2, [9], None)]


async def test_the_only_one_without_outputs_is_a_plain_request() -> None:
    scene = Scene()
    scene.decode(choices=so_far([3], []), params=SamplingParams(prompt_logprobs=2))
    assert not any(one.choices for one in scene.engine.requests.values())
    asked = {one.choice: one.params.prompt_logprobs for one in scene.engine.requests.values()}
    assert asked == {0: None, 1: 2}, "an output comes after all of the prompt's"


async def test_one_choice_by_another_number_keeps_it() -> None:
    scene = Scene()
    scene.decode(choices=[m.ChoiceSoFar(4, [3])])
    assert scene.engine.requests["r#1"].choice == 4
    scene.output(9)
    assert told(scene.emitted()) == [(4, 1, [9], None)]


async def test_a_grammar_is_compiled_once_for_all_choices(wait_for: Callable[..., Any]) -> None:
    scene = Scene()
    params = SamplingParams(structured_output=StructuredOutput("regex", "a+", "guided_regex"))
    scene.decode(params=params, choices=so_far([], [], [3]))
    await wait_for(lambda: scene.sent)
    assert {name: one.grammar for name, one in scene.engine.requests.items() if not one.choices} == {
        "r#1/0": "a+",
        "r#1/1": "a+",
        "r#1/2": "a+",
    }


# --- refusals -------------------------------------------------------------------------------------------------------


async def test_every_choice_takes_a_seat(wait_for: Callable[..., Any]) -> None:
    scene = Scene(max_requests=5)
    scene.decode(request_id="a", choices=so_far([], [], []))
    scene.decode(request_id="b", choices=so_far([], [], []))
    (rejected,) = [message for message in scene.sent if isinstance(message, m.Rejected)]
    assert (rejected.request_id, rejected.is_retryable) == ("b", True)
    assert rejected.message == "3 requests are held, at most 5 may be"
    scene.compiler.gate.clear()
    params = SamplingParams(structured_output=StructuredOutput("regex", "a+", "guided_regex"))
    scene.decode(request_id="c", choices=so_far([], []), params=params)
    assert scene.node.num_live_requests == 5
    scene.output(9, FinishReason.STOP, engine_id="a#1/1")
    assert scene.node.num_live_requests == 4
    scene.decode(request_id="d", choices=so_far([]))
    assert scene.sent[-1] == m.Accepted(request_id="d", leg=1)
    scene.compiler.gate.set()
    await wait_for(lambda: scene.sent[-1] == m.Accepted(request_id="c", leg=1))
    assert scene.node.num_live_requests == 5


async def test_a_choice_named_twice_is_refused() -> None:
    scene = Scene()
    scene.decode(choices=[m.ChoiceSoFar(1), m.ChoiceSoFar(2, [3]), m.ChoiceSoFar(1)])
    (rejected,) = scene.sent
    assert rejected.message == "the choices [1, 2, 1] are not distinct"
    assert not rejected.is_retryable
    assert scene.engine.requests == {}
    assert scene.node.num_live_requests == 0


async def test_one_choice_that_can_never_run_refuses_all() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], [1] * 98))
    (rejected,) = scene.sent
    assert rejected.code == "context_length_exceeded"
    assert scene.engine.requests == {}


async def test_an_output_out_of_the_vocabulary_is_refused() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [3, 50]))
    assert scene.sent[0].message == "token id 50 is out of range, the vocabulary has 50 tokens"


# --- outputs --------------------------------------------------------------------------------------------------------


async def test_outputs_say_whose_they_are_and_each_ends_by_itself() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], []))
    requests = scene.engine.requests
    scene.node.engine_events(
        [
            OutputEvent("r#1/0", requests["r#1/0"], 0, 9, num_cached_tokens=2),
            OutputEvent("r#1/1", requests["r#1/1"], 0, 8, num_cached_tokens=2),
        ]
    )
    assert len(scene.sent) == 2, "all of a step in one message"
    assert [o.num_cached_tokens for o in scene.emitted()] == [2, 2]
    for one in requests.values():
        one.append_output(9)
    scene.output(2, FinishReason.STOP, engine_id="r#1/1")
    assert scene.node.num_live_requests == 1
    assert scene.engine.released == [], "the prompt may still be needed"
    scene.output(7, FinishReason.LENGTH, engine_id="r#1/0")
    assert told(scene.emitted()[2:]) == [(1, 1, [2], "stop"), (0, 1, [7], "length")]
    assert [o.num_cached_tokens for o in scene.emitted()[2:]] == [None, None]
    assert scene.engine.released == ["r#1"]
    assert scene.engine.aborted == []
    assert scene.node.num_live_requests == 0


async def test_what_the_source_had_cached_counts_for_every_choice() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], []), sources=[SOURCE], prompt_token_ids=[1] * 40)
    scene.fetches[0][1].accepted(32)
    await drained()
    for number in (0, 1):
        scene.output(9, engine_id=f"r#1/{number}")
        scene.output(9, engine_id=f"r#1/{number}")
    assert [o.num_cached_tokens for o in scene.emitted()] == [32, None, 32, None]


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_an_abort_of_one_choice_leaves_the_others() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], []), sources=[SOURCE], prompt_token_ids=[1] * 40)
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=1))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=1))  # repeated
    assert scene.engine.aborted == ["r#1/1"]
    assert scene.node.num_live_requests == 2
    assert not scene.fetches[0][0].is_cancelled
    scene.node.engine_events([OutputEvent("r#1/1", scene.engine.requests["r#1/1"], 0, 9)])  # was on its way
    assert scene.emitted() == []
    scene.output(9, engine_id="r#1/2")
    assert told(scene.emitted()) == [(2, 0, [9], None)]
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=0))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=2))
    assert scene.engine.aborted == ["r#1/1", "r#1/0", "r#1/2", "r#1"], "the last one takes the prompt along"
    assert scene.fetches[0][0].is_cancelled
    assert scene.node.hello(PROXY).live_requests == []


async def test_an_abort_of_an_earlier_leg_leaves_this_ones_choice() -> None:
    scene = Scene()
    scene.decode(leg=2, choices=so_far([], []))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=1))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=2, choice=5))
    assert scene.engine.aborted == []
    assert scene.node.num_live_requests == 2


@pytest.mark.parametrize("end", ["abort", "proxy lost", "newer leg", "node stops"])
async def test_the_end_of_all_ends_each_and_the_prompt(end: str) -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], [3]))
    if end == "abort":
        scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    elif end == "proxy lost":
        scene.node.proxy_lost(PROXY)
    elif end == "node stops":
        scene.node.abort_all()
    else:
        scene.decode(leg=2, choices=so_far([], [], []))
    assert sorted(scene.engine.aborted) == ["r#1", "r#1/0", "r#1/1", "r#1/2"]
    assert sorted(scene.engine.released) == ["r#1", "r#1/2"]
    assert scene.node.num_live_requests == (3 if end == "newer leg" else 0)


async def test_an_abort_of_one_choice_while_the_grammar_is_compiled_leaves_the_others(
    wait_for: Callable[..., Any],
) -> None:
    scene = Scene()
    scene.compiler.gate.clear()
    params = SamplingParams(structured_output=StructuredOutput("regex", "a+", "guided_regex"))
    scene.decode(params=params, choices=so_far([3], [3]))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=0))
    scene.compiler.gate.set()
    await wait_for(lambda: scene.sent)
    assert scene.sent == [m.Accepted(request_id="r", leg=1)]
    assert "r#1/1" in scene.engine.requests


async def test_a_choice_that_fails_is_told_at_its_next_index() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], []))
    scene.output(9, engine_id="r#1/1")
    scene.node.engine_events([FailedEvent("r#1/1", "no token may follow")])
    scene.output(8, engine_id="r#1/0")
    assert told(scene.emitted()) == [(1, 0, [9], None), (1, 1, [], "error"), (0, 0, [8], None)]
    assert scene.emitted()[1].error == "no token may follow"
    assert scene.node.num_live_requests == 1
    assert scene.engine.released == []


async def test_a_prompt_that_fails_ends_all_its_choices_and_no_other() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], [3]))
    scene.node.engine_events([FailedEvent("r#1", "RuntimeError: no")])
    assert told(scene.emitted()) == [(0, 0, [], "error"), (1, 0, [], "error")]
    assert scene.engine.released == ["r#1"]
    assert scene.node.num_live_requests == 1


async def test_the_deadline_ends_every_choice_that_has_not_ended(wait_for: Callable[..., Any]) -> None:
    scene = Scene()
    scene.decode(choices=so_far([], [], []), deadline_seconds=0.01)
    scene.output(2, FinishReason.STOP, engine_id="r#1/0")
    scene.output(9, engine_id="r#1/2")
    await wait_for(lambda: len(scene.emitted()) == 4)
    assert told(scene.emitted()[2:]) == [(1, 0, [], "error"), (2, 1, [], "error")]
    assert {o.error for o in scene.emitted()[2:]} == {"the request's deadline passed"}
    assert scene.engine.aborted == ["r#1/1", "r#1/2", "r#1"]


async def test_resend_repeats_one_choice() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], []))
    for token_id in (11, 12, 13):
        for number in (0, 1):
            scene.output(token_id + 10 * number, engine_id=f"r#1/{number}")
    scene.output(2, FinishReason.STOP, engine_id="r#1/1")
    assert told(resent(scene, 1, 2)) == [(1, 2, [23], None), (1, 3, [2], "stop")]
    assert told(resent(scene, 0, 1)) == [(0, 1, [12], None), (0, 2, [13], None)]
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=0))
    assert resent(scene, 0, 0) == []
    assert len(resent(scene, 1, 0)) == 4, "not acknowledged yet"
    scene.node.acknowledged(PROXY, len(scene.sent))
    assert scene.node.hello(PROXY).live_requests == []


# --- the prompt's log-probabilities ---------------------------------------------------------------------------------


async def test_pieces_come_with_the_first_choice_and_again_when_asked() -> None:
    scene = Scene()
    scene.decode(choices=so_far([], []), params=SamplingParams(prompt_logprobs=0))
    scored(scene, 1, 1)
    scored(scene, 2, 1)
    for number in (0, 1):
        scene.output(9, engine_id=f"r#1/{number}")
    pieces = scene.emitted()[:2]
    assert [(o.choice, o.index, o.prompt_start, o.prompt_logprobs) for o in pieces] == [
        (0, 0, 1, [m.TokenLogprobs(-1.0)]),
        (0, 0, 2, [m.TokenLogprobs(-2.0)]),
    ]
    assert told(pieces) == [(0, 0, [], None), (0, 0, [], None)]
    again = resent(scene, 0, 0)
    assert again[:2] == pieces
    assert told(again[2:]) == [(0, 0, [9], None)]
    assert told(resent(scene, 1, 0)) == [(1, 0, [9], None)]


async def test_pieces_for_nobody_are_dropped() -> None:
    scene = Scene()
    scene.decode(params=SamplingParams(prompt_logprobs=0))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    scored(scene, 1, 1)
    assert scene.emitted() == []


async def test_hidden_states_of_the_whole_prompt_reach_the_engine_once_it_has_blocks() -> None:
    scene = Scene()
    params = SamplingParams(prompt_logprobs=0)
    scene.decode(choices=so_far([], []), params=params, sources=[SOURCE], prompt_token_ids=[1] * 40)
    _, listener = scene.fetches[0]
    listener.hidden(np.zeros((30, 8), np.float32).tobytes())
    await drained()
    assert scene.engine.prompt_rows == []
    scene.node.engine_events([ReservedEvent("r#1", 0, (1, 2, 3))])
    listener.hidden(np.zeros((10, 8), np.float32).tobytes())
    await drained()
    assert scene.engine.prompt_rows == [("r#1", 0, 30), ("r#1", 30, 10)]


# --- beams ----------------------------------------------------------------------------------------------------------

BEAMS = SamplingParams(max_tokens=2, logprobs=1, beam_search=BeamSearchParams(width=3))


def end_search(scene: Scene, num_candidates: int = 9, engine_id: str = "r#1") -> BeamSearch:
    """Token 10 + i is the less likely the greater i is, at each of two steps; 2 is the model's end token."""
    request: Request = scene.engine.requests[engine_id]
    assert request.params is not None
    search = request.beam_search = BeamSearch(request.params, request.stop_token_ids, 2)
    ids = [2, *range(10, 40)][:num_candidates]
    while not search.is_over:
        candidates = m.TokenLogprobs(0.0, ids, [-0.5 - 0.3 * i for i in range(len(ids))])
        search.advance([candidates] * len(search.running_token_ids))
    scene.node.engine_events([SearchEndedEvent(engine_id, request)])
    return search


async def test_beams_are_one_request_and_the_best_are_told_at_once() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=so_far([], []))
    request = scene.engine.requests["r#1"]
    assert list(scene.engine.requests) == ["r#1"]
    assert (request.choices, request.max_num_tokens) == ([], 5)
    request.num_cached_tokens = 2
    first, second, _ = end_search(scene).results(3)
    assert len(scene.sent) == 2
    assert told(scene.emitted()) == [
        (0, 0, first.token_ids, first.finish_reason.value),
        (1, 0, second.token_ids, second.finish_reason.value),
    ]
    assert first.token_ids != second.token_ids
    assert {o.finish_reason for o in scene.emitted()} <= {"stop", "length"}
    assert [o.logprobs for o in scene.emitted()] == [first.logprobs, second.logprobs]
    assert [o.num_cached_tokens for o in scene.emitted()] == [2, 2]
    assert scene.engine.released == ["r#1"]
    assert scene.engine.aborted == []
    assert scene.node.num_live_requests == 0
    assert resent(scene, 1, 0) == scene.emitted()[1:2]


async def test_after_a_move_the_beams_that_are_missing_keep_their_places() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=[m.ChoiceSoFar(2), m.ChoiceSoFar(1)])
    _, second, third = end_search(scene).results(3)
    assert [(o.choice, o.token_ids) for o in scene.emitted()] == [(2, third.token_ids), (1, second.token_ids)]


async def test_one_beam_by_another_number_is_aborted_with_its_search() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=[m.ChoiceSoFar(2)])
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    assert scene.engine.aborted[-1] == "r#1"
    assert scene.engine.released == ["r#1"]


async def test_fewer_beams_than_choices_fail_the_rest() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=so_far([], [], []))
    assert len(end_search(scene, num_candidates=1).results(3)) == 1
    found = {o.choice: (o.finish_reason, o.error) for o in scene.emitted()}
    assert found == {
        0: ("stop", None),
        1: ("error", "beam search found 1 answers only"),
        2: ("error", "beam search found 1 answers only"),
    }
    assert scene.node.num_live_requests == 0


@pytest.mark.parametrize("gone", [0, 1])
async def test_an_answer_that_nobody_wants_leaves_the_search_to_the_other(gone: int) -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=so_far([], []))
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=gone))
    assert "r#1" not in scene.engine.aborted
    best = end_search(scene).results(2)
    assert [(o.choice, o.token_ids) for o in scene.emitted()] == [(1 - gone, best[1 - gone].token_ids)]
    assert scene.engine.released == ["r#1"]


async def test_the_last_answer_that_nobody_wants_ends_the_search() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=so_far([], []))
    for number in (0, 1):
        scene.node.received(PROXY, m.Abort(request_id="r", leg=1, choice=number))
    assert scene.engine.aborted[-1] == "r#1"
    assert scene.engine.released == ["r#1"]


async def test_a_search_that_fails_fails_all_its_answers() -> None:
    scene = Scene()
    scene.decode(params=BEAMS, choices=so_far([], []))
    scene.node.engine_events([FailedEvent("r#1", "ValueError: boom")])
    assert told(scene.emitted()) == [(0, 0, [], "error"), (1, 0, [], "error")]
    assert scene.node.num_live_requests == 0
