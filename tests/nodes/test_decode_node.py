"""A decode node towards its proxies: what it accepts, emits, repeats and lets go. Scripted engine, real event loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from common import messages as m
from common.engine.events import FailedEvent
from common.request import FinishReason
from common.sampling_params import SamplingParams
from common.structured_output import StructuredOutput
from tests.nodes.scripted_scene import PROXY, Scene, drained


async def test_decode_is_accepted_and_its_outputs_are_emitted_once() -> None:
    scene = Scene()
    scene.decode()
    scene.decode()  # repeated by the proxy: no second request
    assert scene.sent == [m.Accepted(request_id="r", leg=1)]
    scene.output(9)
    scene.output(2, FinishReason.STOP)
    assert [(o.index, o.token_ids, o.finish_reason) for o in scene.emitted()] == [(0, [9], None), (1, [2], "stop")]
    assert scene.emitted()[0].num_cached_tokens == 0
    assert scene.emitted()[1].num_cached_tokens is None
    assert scene.node.num_live_requests == 0


async def test_model_end_tokens_and_own_stops_end_a_request_unless_ignored() -> None:
    scene = Scene()
    scene.decode(request_id="a", params=SamplingParams(stop_token_ids=(8,)))
    scene.decode(request_id="b", params=SamplingParams(stop_token_ids=(8,), ignore_eos=True))
    assert scene.engine.requests["a#1"].stop_token_ids == {2, 8}
    assert scene.engine.requests["b#1"].stop_token_ids == {8}


async def test_resumed_request_keeps_its_outputs_and_its_length_limit() -> None:
    scene = Scene()
    scene.decode(choices=[m.ChoiceSoFar(0, [3, 4])], params=SamplingParams(max_tokens=10))
    request = scene.engine.requests["r#1"]
    assert request.all_token_ids == [5, 6, 7, 3, 4]
    assert request.max_num_tokens == 13
    scene.output(9)
    assert scene.emitted()[0].index == 2


async def test_token_out_of_the_vocabulary_is_rejected_for_good() -> None:
    scene = Scene()
    scene.decode(prompt_token_ids=[5, 50])
    (rejected,) = scene.sent
    assert isinstance(rejected, m.Rejected)
    assert not rejected.is_retryable
    assert rejected.message == "token id 50 is out of range, the vocabulary has 50 tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (10**9,)),
        ("logit_bias", {50: 1.0}),
        ("allowed_token_ids", (3, 50)),
        ("bad_words_token_ids", ((3,), (50, 4))),
    ],
)
async def test_m11_parameters_out_of_the_vocabulary_are_rejected_before_the_engine(field: str, value: object) -> None:
    scene = Scene()
    scene.decode(params=SamplingParams(**{field: value}))
    (rejected,) = scene.sent
    assert isinstance(rejected, m.Rejected)
    assert (rejected.code, rejected.is_retryable) == ("invalid_value", False)
    assert re.fullmatch(rf"{field} has token id (50|1000000000), must be from 0 to 49", rejected.message)
    assert scene.engine.requests == {}


async def test_what_can_never_fit_is_rejected_with_the_numbers() -> None:
    scene = Scene()
    scene.decode(prompt_token_ids=[1] * 101)
    (rejected,) = scene.sent
    assert isinstance(rejected, m.Rejected)
    assert rejected.code == "context_length_exceeded"
    assert "101" in rejected.message


async def test_full_or_draining_node_rejects_for_another_to_take() -> None:
    scene = Scene(max_requests=1)
    scene.decode(request_id="a")
    scene.decode(request_id="b")
    scene.node.received(PROXY, m.Drain())
    scene.decode(request_id="c")
    rejections = [message for message in scene.sent if isinstance(message, m.Rejected)]
    assert [(r.request_id, r.code, r.is_retryable) for r in rejections] == [
        ("b", "rate_limit_exceeded", True),
        ("c", "service_unavailable", True),
    ]
    assert scene.node.status().is_draining


async def test_abort_ends_the_request_and_its_fetch_before_blocks_go_back() -> None:
    scene = Scene()
    scene.decode(sources=[m.Source("p", ["tcp://127.0.0.1:1"])], prompt_token_ids=[1] * 40)
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    assert scene.engine.aborted == ["r#1"]
    assert scene.fetches[0][0].is_cancelled
    assert scene.engine.released == []
    scene.fetches[0][1].ended(num_complete_blocks=0, error="cancelled")
    await drained()
    assert scene.engine.released == ["r#1"]


async def test_abort_of_an_older_leg_leaves_the_newer_one() -> None:
    scene = Scene()
    scene.decode(leg=1)
    scene.decode(leg=2)
    assert scene.engine.aborted == ["r#1"]
    scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    assert scene.engine.aborted == ["r#1"]
    scene.output(9, engine_id="r#2")
    assert scene.emitted()[-1].leg == 2
    assert scene.node.hello(PROXY).live_requests == [m.LiveRequest("r", 2)]


async def test_resend_repeats_outputs_from_the_index_on() -> None:
    scene = Scene()
    scene.decode()
    for token_id in (11, 12, 13):
        scene.output(token_id)
    before = len(scene.emitted())
    scene.node.received(PROXY, m.Resend(request_id="r", leg=1, choice=0, from_index=1))
    assert [o.token_ids for o in scene.emitted()[before:]] == [[12], [13]]


async def test_hello_lists_finished_requests_until_they_are_acknowledged() -> None:
    scene = Scene()
    scene.decode()
    scene.output(9, FinishReason.LENGTH)
    assert scene.node.hello(PROXY).live_requests == [m.LiveRequest("r", 1)]
    scene.node.acknowledged(PROXY, len(scene.sent))
    assert scene.node.hello(PROXY).live_requests == []


async def test_lost_proxy_takes_its_requests_along() -> None:
    scene = Scene()
    scene.decode()
    scene.node.proxy_lost(PROXY)
    assert scene.engine.aborted == ["r#1"]
    assert scene.node.num_live_requests == 0
    assert scene.node.hello(PROXY).live_requests == []


async def test_engine_failure_ends_the_request_with_the_error() -> None:
    scene = Scene()
    scene.decode()
    scene.node.engine_events([FailedEvent("r#1", "RuntimeError: no")])
    (output,) = scene.emitted()
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: no")
    assert scene.engine.released == ["r#1"]


async def test_deadline_ends_the_request_with_an_error(wait_for: Callable[..., Any]) -> None:
    scene = Scene()
    scene.decode(deadline_seconds=0.01)
    await wait_for(lambda: scene.emitted())
    assert scene.emitted()[0].error == "the request's deadline passed"
    assert scene.engine.aborted == ["r#1"]


async def test_a_proxy_may_reset_the_prefix_cache() -> None:
    scene = Scene()
    scene.node.received(PROXY, m.ResetPrefixCache())
    assert scene.engine.num_resets == 1


# --- grammars -------------------------------------------------------------------------------------------------------


def regex(text: str) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput("regex", text, "guided_regex"))


async def test_a_decode_with_a_grammar_is_accepted_when_that_is_compiled(wait_for: Callable[..., Any]) -> None:
    scene = Scene()
    scene.compiler.gate.clear()
    scene.decode(params=regex("a+"))
    scene.decode(params=regex("a+"))  # repeated by the proxy
    scene.decode(request_id="other")
    assert scene.sent == [m.Accepted(request_id="other", leg=1)], "nobody else waits for it"
    assert scene.node.num_live_requests == 2, "a drain waits for both"
    scene.compiler.gate.set()
    await wait_for(lambda: len(scene.sent) == 2)
    assert scene.sent[1] == m.Accepted(request_id="r", leg=1)
    assert scene.engine.requests["r#1"].grammar == "a+"
    assert scene.engine.requests["other#1"].grammar is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("bad", "guided_regex: unclosed group"), ("odd", "guided_regex could not be compiled: RuntimeError")],
)
async def test_what_is_no_grammar_is_rejected_for_good_by_its_field(
    wait_for: Callable[..., Any], text: str, message: str
) -> None:
    scene = Scene()
    scene.decode(params=regex(text))
    await wait_for(lambda: scene.sent)
    assert scene.sent == [
        m.Rejected(
            request_id="r", leg=1, code="invalid_value", message=message, is_retryable=False, param="guided_regex"
        )
    ]
    assert scene.node.num_live_requests == 0
    assert scene.engine.requests == {}


@pytest.mark.parametrize("end", ["abort", "proxy lost", "newer leg", "node stops"])
async def test_a_grammar_that_nobody_waits_for_admits_nothing(wait_for: Callable[..., Any], end: str) -> None:
    scene = Scene()
    scene.compiler.gate.clear()
    scene.decode(params=regex("old"))
    if end == "abort":
        scene.node.received(PROXY, m.Abort(request_id="r", leg=1))
    elif end == "proxy lost":
        scene.node.proxy_lost(PROXY)
    elif end == "node stops":
        scene.node.abort_all()
    else:
        scene.decode(leg=2, params=regex("new"))
        scene.node.received(PROXY, m.Abort(request_id="r", leg=1))  # an older one's
    assert scene.node.num_live_requests == (1 if end == "newer leg" else 0)
    scene.compiler.gate.set()
    scene.decode(request_id="last", params=regex("last"))
    await wait_for(lambda: "last#1" in scene.engine.requests)
    assert {name: request.grammar for name, request in scene.engine.requests.items()} == {
        "last#1": "last",
        **({"r#2": "new"} if end == "newer leg" else {}),
    }


async def test_a_grammar_that_takes_too_long_is_refused_and_one_that_waits_for_it_may_go_elsewhere(
    wait_for: Callable[..., Any],
) -> None:
    scene = Scene(compile_seconds=0.05)
    scene.compiler.gate.clear()
    for name in "abc":  # there are two threads
        scene.decode(request_id=name, params=regex("slow"))
    await wait_for(lambda: len(scene.sent) == 3)
    scene.compiler.gate.set()
    found = {r.request_id: r for r in scene.sent if isinstance(r, m.Rejected)}
    assert found["a"].message == "guided_regex was not compiled within 0.05 s, must be simpler"
    assert [found[name].is_retryable for name in "abc"] == [False, False, True]
