"""Several choices of a prompt: n, best_of, beams. Each its own text and end, all on one node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from common import messages as m
from common.sampling_params import BeamSearchParams

CHAT = "/v1/chat/completions"
EOS = 2
WORDS = [["the ", "quick ", "brown ", "fox ", "jumps"], ["red"], ["Hello ", "there"]]
TEXTS = ["".join(words) for words in WORDS]


def scripts(proxy: Any) -> Callable[[m.Decode], dict[int, Any]]:
    """Choices that end at different steps."""
    return lambda _: {i: [*proxy.ids(*words), [EOS]] for i, words in enumerate(WORDS)}


def tokens(proxy: Any, *words: str) -> list[int]:
    return [token_id for word in proxy.ids(*words) for token_id in word]


def endless(proxy: Any, wait: Any) -> Callable[[m.Decode], dict[int, Any]]:
    """All choices stop after two steps and go on after a wait."""
    words = ["the quick brown fox", "red blue green fine", "Hello there world more"]
    pieces = [text.split(" ") for text in words]
    return lambda _: {
        i: [*proxy.ids(*(word + " " for word in text[:2])), wait, *proxy.ids(*text[2:]), [EOS]]
        for i, text in enumerate(pieces)
    }


async def gather(proxy: Any, texts: dict[int, str], reasons: dict[int, Any], **body: Any) -> None:
    """Text and end of each choice of a stream, as they come."""
    async for frame in proxy.frames(**body):
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            index = choice["index"]
            assert index not in reasons
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]


# --- n --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_v10_parallel_samples_keep_their_own_text_and_end(proxy: Any, path: str, stream: bool) -> None:
    """They overwrote each other's partial result."""
    node = await proxy.node(scripts(proxy))
    body = {"n": 3, "max_tokens": 8, "return_token_ids": True}
    if stream:
        found = await proxy.stream(path, stream_options={"include_usage": True}, **body)
        texts = [found.joined(i) for i in range(3)]
        reasons = [[c["finish_reason"] for c in found.choices(i) if c["finish_reason"]] for i in range(3)]
        ids = [[j for c in found.choices(i) for j in c.get("token_ids", [])] for i in range(3)]
        usage = found.chunks[-1]["usage"]
    else:
        found = await (proxy.chat(**body) if path == CHAT else proxy.complete(**body))
        assert [c["index"] for c in found["choices"]] == [0, 1, 2]
        texts = [c["message"]["content"] if path == CHAT else c["text"] for c in found["choices"]]
        reasons = [[c["finish_reason"]] for c in found["choices"]]
        ids = [c["token_ids"] for c in found["choices"]]
        usage = found["usage"]
    spelled = [tokens(proxy, *words) for words in WORDS]
    assert texts == [proxy.tokenizer.decode(spelled[0][:8]), *TEXTS[1:]]
    assert reasons == [["length"], ["stop"], ["stop"]]
    assert ids == [spelled[0][:8], [*spelled[1], EOS], [*spelled[2], EOS]]
    decode = await node.expect(m.Decode)
    assert [(choice.choice, choice.outputs) for choice in decode.choices] == [(0, []), (1, []), (2, [])]
    assert usage["prompt_tokens"] == len(decode.prompt_token_ids)
    assert usage["completion_tokens"] == 8 + len(spelled[1]) + len(spelled[2])
    assert usage["prompt_tokens_details"] == {"cached_tokens": min(3, usage["prompt_tokens"])}
    assert node.count(m.Decode) == 1
    assert node.count(m.Abort) == 0


async def test_every_prompt_has_all_its_choices(proxy: Any) -> None:
    def script(decode: m.Decode) -> Any:
        name = proxy.tokenizer.decode(decode.prompt_token_ids)
        return {c.choice: [*proxy.ids(f"{name}{c.choice}"), [EOS]] for c in decode.choices}

    node = await proxy.node(script)
    reply = await proxy.complete(prompt=["a", "b"], n=3, seed=7)
    found = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert found == list(enumerate(["a0", "a1", "a2", "b0", "b1", "b2"]))
    assert [(await node.expect(m.Decode, i)).params.seed for i in (1, 2)] == [7, 7]
    stream = await proxy.stream(prompt=["a", "b"], n=3)
    assert [stream.joined(i) for i in range(6)] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert node.count(m.Decode) == 4
    seeds = {(await node.expect(m.Decode, i)).params.seed for i in (3, 4)}
    assert len(seeds) == 2, "without a seed prompts are samples of their own"


async def test_chat_opens_each_choice(proxy: Any) -> None:
    await proxy.node(scripts(proxy))
    stream = await proxy.stream(CHAT, n=3)
    assert [stream.choices(i)[0]["delta"] for i in range(3)] == [{"role": "assistant", "content": ""}] * 3
    async with proxy.sdk() as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        reply = await client.chat.completions.create(model="tiny", messages=messages, n=3)
    assert [choice.message.content for choice in reply.choices] == TEXTS


async def test_a_choice_is_a_request_in_the_metrics_and_a_prompt_is_counted_once(proxy: Any) -> None:
    await proxy.node(scripts(proxy))
    usage = (await proxy.complete(n=3))["usage"]
    metrics = await proxy.metrics()
    label = '{model_name="tiny"}'
    assert metrics['vllm:request_success_total{finished_reason="stop",model_name="tiny"}'] == 3
    assert metrics[f"vllm:generation_tokens_total{label}"] == usage["completion_tokens"]
    assert metrics[f"vllm:prompt_tokens_total{label}"] == usage["prompt_tokens"] == 1
    each, once = ["e2e_request_latency_seconds", "request_generation_tokens"], ["time_to_first_token_seconds"]
    once += ["request_prompt_tokens", "request_prefill_time_seconds", "request_queue_time_seconds"]
    assert [metrics[f"vllm:{name}_count{label}"] for name in each] == [3, 3]
    assert [metrics[f"vllm:{name}_count{label}"] for name in once] == [1, 1, 1, 1]


# --- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_one_choice_only(proxy: Any, wait: Any, stream: bool) -> None:
    node = await proxy.node(endless(proxy, wait))
    run = proxy.stream if stream else proxy.complete
    task = asyncio.create_task(run(n=3, stop="blue"))
    abort = await node.expect(m.Abort)
    decode = await node.expect(m.Decode)
    assert (abort.request_id, abort.leg, abort.choice) == (decode.request_id, 1, 1)
    [live] = node.running
    assert sorted(live.choices) == [0, 2]
    node.resume.set()
    found = await task
    texts = [found.joined(i) if stream else found["choices"][i]["text"] for i in range(3)]
    assert texts == ["the quick brownfox", "red ", "Hello there worldmore"]
    assert node.count(m.Abort) == 1


async def test_the_last_choice_that_a_stop_string_ends_ends_the_request(proxy: Any, wait: Any) -> None:
    hello = [*proxy.tokenizer.encode("Hello"), EOS]
    node = await proxy.node(lambda _: {0: [hello], 1: [*proxy.ids("red blue"), wait]})
    reply = await proxy.complete(n=2, stop="blue")
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in reply["choices"]] == [
        ("Hello", "stop", None),
        ("red ", "stop", "blue"),
    ]
    assert (await node.expect(m.Abort)).choice is None
    assert not node.live


async def test_a_prompt_whose_choices_all_have_ended_does_not_wait_for_the_others(proxy: Any, wait: Any) -> None:
    def script(decode: m.Decode) -> Any:
        stopped = decode.prompt_token_ids == proxy.tokenizer.encode("a")
        return [*proxy.ids("red blue" if stopped else "Hello"), wait, [EOS]]

    node = await proxy.node(script)
    task = asyncio.create_task(proxy.complete(prompt=["a", "b"], n=2, stop="blue"))
    abort = await node.expect(m.Abort, 2)  # the first one is for a choice alone
    assert abort.choice is None
    [live] = node.running
    assert live.decode.request_id != abort.request_id
    node.resume.set()
    assert [choice["text"] for choice in (await task)["choices"]] == ["red ", "red ", "Hello", "Hello"]


async def test_a_choice_that_has_ended_gets_nothing_more(proxy: Any, wait: Any) -> None:
    """And a node that goes on with it, or makes up others, is told."""
    node = await proxy.node()
    task = asyncio.create_task(proxy.complete(n=2, stop="blue"))
    decode = await node.expect(m.Decode)
    [blue], [more] = proxy.ids("blue", "more")[0][-1:], proxy.ids("more")[0][-1:]
    ids = proxy.tokenizer.encode("red blue")
    await node.output(decode, choice=1, index=0, token_ids=ids)
    assert (await node.expect(m.Abort)).choice == 1
    await node.output(decode, choice=1, index=len(ids), token_ids=[blue, more])
    assert (await node.expect(m.Abort, 2)).choice == 1
    await node.output(decode, choice=1, index=len(ids), token_ids=[more], finish_reason="length")
    await node.output(decode, choice=2, index=0, token_ids=[more])
    assert (await node.expect(m.Abort, 3)).choice == 2
    await node.output(decode, choice=2, index=0, finish_reason="stop")
    await node.output(decode, choice=0, index=0, token_ids=[EOS], finish_reason="stop")
    assert [choice["text"] for choice in (await task)["choices"]] == ["", "red "]
    assert node.count(m.Abort) == 3


# --- nodes that fail, messages that are lost ------------------------------------------------------------------------


async def test_only_unfinished_choices_move(proxy: Any, wait: Any, until: Any) -> None:
    def script(decode: m.Decode) -> Any:
        whole = scripts(proxy)(decode)
        return {0: [*whole[0][:2], wait, *whole[0][2:]], 1: whole[1], 2: [whole[2][0], [], wait, *whole[2][1:]]}

    a = await proxy.node(script)
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    task = asyncio.create_task(gather(proxy, texts, reasons, n=3, stream_options={"include_usage": True}))
    await until(lambda: texts == {0: "the quick ", 1: "red", 2: "Hello "} and 1 in reasons)
    b = await proxy.node(scripts(proxy))
    await a.send(m.Goodbye())
    await task
    assert [texts[i] for i in range(3)] == TEXTS
    assert reasons == dict.fromkeys(range(3), "stop")
    decode = await b.expect(m.Decode)
    so_far = [(0, tokens(proxy, "the ", "quick ")), (2, tokens(proxy, "Hello "))]
    assert [(choice.choice, choice.outputs) for choice in decode.choices] == so_far
    assert decode.leg == 2
    assert proxy.cluster.pool.get(b.instance_id).num_own_sequences == 0


async def test_a_choice_that_a_stop_string_ended_while_nobody_had_the_request(proxy: Any, until: Any) -> None:
    """It is not named to the next node, and there is nobody to be told."""
    a = await proxy.node()
    task = asyncio.create_task(proxy.complete(n=2, stop="blue"))
    decode = await a.expect(m.Decode)
    await a.output(decode, choice=1, index=0, token_ids=proxy.tokenizer.encode("red blue"))
    await a.send(m.Goodbye())
    await until(lambda: proxy.cluster.admission.num_waiting == 1)
    b = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert [choice["text"] for choice in (await task)["choices"]] == ["Hello", "red "]
    assert [choice.choice for choice in (await b.expect(m.Decode)).choices] == [0]


async def test_a_lost_message_is_asked_for_choice_by_choice(proxy: Any, wait: Any, until: Any) -> None:
    """A step of all choices is lost, the end of one of them with it, of which no later output tells."""
    node = await proxy.node(
        lambda _: {
            0: [*proxy.ids("the "), wait, *proxy.ids("quick "), wait, *proxy.ids("fox"), [EOS]],
            1: [*proxy.ids("red "), [], [*proxy.tokenizer.encode("blue"), EOS]],
            2: [[*proxy.tokenizer.encode("one"), EOS]],
        }
    )
    texts: dict[int, str] = {}
    task = asyncio.create_task(gather(proxy, texts, {}, n=3, logprobs=1))
    await until(lambda: texts == {0: "the ", 1: "red ", 2: "one"})
    node.drop_next()
    node.resume.set()
    await node.expect(m.Resend, 2)
    resends = [message for message in node.received if isinstance(message, m.Resend)]
    indexes = {resend.choice: resend.from_index for resend in resends}
    assert indexes == {0: len(proxy.tokenizer.encode("the ")), 1: len(proxy.tokenizer.encode("red "))}
    await until(lambda: texts[1] == "red blue")
    node.resume.set()
    await task
    assert texts == {0: "the quick fox", 1: "red blue", 2: "one"}
    assert node.count(m.Decode) == 1


async def test_a_gap_of_one_choice_is_asked_for_alone(proxy: Any) -> None:
    node = await proxy.node()
    task = asyncio.create_task(proxy.complete(n=2))
    decode = await node.expect(m.Decode)
    [a, b, c] = [i for [i] in proxy.bytes_ids(b"abc")]
    await node.output(decode, choice=0, index=0, token_ids=[a, a])
    await node.output(decode, choice=1, index=0, token_ids=[a])
    await node.output(decode, choice=1, index=2, token_ids=[c])
    resend = await node.expect(m.Resend)
    assert (resend.leg, resend.choice, resend.from_index) == (1, 1, 1)
    await node.output(decode, choice=1, index=0, token_ids=[a, b, c, EOS], finish_reason="stop")
    await node.output(decode, choice=0, index=2, token_ids=[EOS], finish_reason="stop")
    assert [choice["text"] for choice in (await task)["choices"]] == ["aa", "abc"]
    assert node.count(m.Resend) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_any_losses_leave_every_choice_whole(proxy: Any, seed: int) -> None:
    """Two nodes lose a tenth of what they send, one of them dies on the way."""
    words = [[f"{choice}-{i} " for i in range(10 * (choice + 1))] for choice in range(4)]

    def script(_: m.Decode) -> Any:
        return {choice: [*proxy.ids(*text), [EOS]] for choice, text in enumerate(words)}

    a, b = await proxy.node(script, max_num_seqs=20), await proxy.node(script, max_num_seqs=20)
    a.losses, b.losses = random.Random(seed), random.Random(seed + 100)
    found: list[dict[int, str]] = [{} for _ in range(6)]
    tasks = [asyncio.create_task(gather(proxy, texts, {}, n=4, max_tokens=500)) for texts in found]
    await a.expect(m.Decode, 2)
    if seed % 2:
        await a.die()
    await asyncio.gather(*tasks)
    assert found == [{choice: "".join(text) for choice, text in enumerate(words)}] * 6


async def test_an_error_of_one_choice_ends_the_request(proxy: Any, wait: Any) -> None:
    node = await proxy.node()
    task = asyncio.create_task(proxy.post("/v1/completions", {"prompt": "x", "n": 2}))
    decode = await node.expect(m.Decode)
    await node.output(decode, choice=1, index=0, finish_reason="error", error="out of memory")
    status, body = await task
    assert (status, body["error"]["code"]) == (500, "node_error")
    assert (await node.expect(m.Abort)).choice is None
    metrics = await proxy.metrics()
    assert metrics['vllm:request_success_total{finished_reason="error",model_name="tiny"}'] == 2


async def test_a_choice_that_was_whole_before_an_error_is_told_whole(proxy: Any) -> None:
    node = await proxy.node()
    task = asyncio.create_task(proxy.stream(n=2))
    decode = await node.expect(m.Decode)
    hello = {"token_ids": [*proxy.tokenizer.encode("Hello"), EOS], "finish_reason": "stop"}
    outputs = [{"choice": 0, **hello}, {"choice": 1, "finish_reason": "error", "error": "out of memory"}]
    head = {"request_id": decode.request_id, "leg": decode.leg, "index": 0}
    await node.send(m.Outputs(outputs=[m.RequestOutput(**head, **fields) for fields in outputs]))
    stream = await task
    assert (stream.joined(0), stream.finish_reason) == ("Hello", "stop")
    assert stream.choices(1) == []
    assert stream.chunks[-1]["error"]["code"] == "node_error"


# --- best_of --------------------------------------------------------------------------------------------------------

MEANS = {0: -2.0, 1: -0.5, 2: -1.0, 3: -0.5, 4: 0.0}


async def best_of(proxy: Any, **body: Any) -> Any:
    """Five choices with these means; the third is long (its sum is the lowest), the last has no token."""
    texts = {0: "zero", 1: "one", 2: "two " * 9, 3: "three", 4: ""}
    node = await proxy.node(lambda _: {i: [*proxy.ids(text), [EOS]] for i, text in texts.items()})
    node.logprobs = lambda choice, token_id, count: m.TokenLogprobs(
        -50.0 if token_id == EOS else MEANS[choice], [token_id][:count], [MEANS[choice]][:count]
    )
    return node, texts


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_best_of_returns_the_likeliest_first(proxy: Any, path: str) -> None:
    node, texts = await best_of(proxy)
    ask = proxy.chat if path == CHAT else proxy.complete
    reply = await ask(n=3, best_of=5)
    choices = reply["choices"]
    shown = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert shown == ["one", "three", "two " * 9]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert all(choice["logprobs"] is None for choice in choices)  # asked of the node, not by the client
    assert (await node.expect(m.Decode)).params.logprobs == 0
    assert reply["usage"]["completion_tokens"] == sum(len(proxy.tokenizer.encode(text)) for text in texts.values())
    assert (await ask(n=5, best_of=5))["choices"][0]["index"] == 0
    decode = await node.expect(m.Decode, 2)
    assert (len(decode.choices), decode.params.logprobs) == (5, None)  # nothing to choose, order as generated


async def test_best_of_each_prompt(proxy: Any) -> None:
    await best_of(proxy)
    reply = await proxy.complete(prompt=["a", "b"], best_of=5, logprobs=1, max_tokens=50)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "one"), (1, "one")]
    assert set(reply["choices"][0]["logprobs"]["token_logprobs"]) == {-0.5}


async def test_an_answer_without_tokens_is_the_last(proxy: Any) -> None:
    node = await proxy.node(lambda _: {0: [[EOS]], 1: [*proxy.ids("Hello"), [EOS]]})
    node.logprobs = lambda _choice, token_id, _count: m.TokenLogprobs(0.0 if token_id == EOS else float("-inf"))
    assert (await proxy.complete(best_of=2))["choices"][0]["text"] == "Hello"


# --- beams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_beams_come_at_the_end_best_first(proxy: Any, stream: bool) -> None:
    texts = ["first beam", "second"]
    node = await proxy.node(lambda _: {i: [[*proxy.tokenizer.encode(text), EOS]] for i, text in enumerate(texts)})
    beams = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    body = {"n": 2, "temperature": 0.3, "seed": 5, **beams}
    found = await (proxy.stream(**body) if stream else proxy.complete(**body))
    assert [found.joined(i) if stream else found["choices"][i]["text"] for i in range(2)] == texts
    decode = await node.expect(m.Decode)
    assert len(decode.choices) == 2
    assert decode.params.beam_search == BeamSearchParams(width=4, length_penalty=0.5, early_stopping="never")


@pytest.mark.parametrize(
    ("body", "width", "num_choices"),
    [({}, 1, 1), ({"n": 2}, 2, 2), ({"best_of": 3}, 3, 1), ({"n": 2, "best_of": 3, "beam_width": 3}, 3, 2)],
)
async def test_the_width_of_beams(proxy: Any, body: dict[str, int], width: int, num_choices: int) -> None:
    """best_of is its older name: a stream may have it, and nothing is left to be chosen here."""
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    stream = await proxy.stream(use_beam_search=True, **body)
    assert [stream.joined(i) for i in range(num_choices)] == ["Hello"] * num_choices
    decode = await node.expect(m.Decode)
    assert decode.params.beam_search == BeamSearchParams(width=width)
    assert (len(decode.choices), decode.params.logprobs) == (num_choices, None)


async def test_what_asks_for_no_beams(proxy: Any) -> None:
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    neutral = {"use_beam_search": False, "beam_width": 2, "length_penalty": 1, "early_stopping": False}
    assert len((await proxy.complete(n=2, best_of=2, **neutral))["choices"]) == 2
    assert (await node.expect(m.Decode)).params.beam_search is None


# --- seats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "num_sequences"), [({"n": 3}, 3), ({"best_of": 4}, 4), ({"use_beam_search": True, "beam_width": 5}, 5)]
)
async def test_a_request_takes_a_seat_for_each_sequence(
    proxy: Any, wait: Any, until: Any, body: dict[str, Any], num_sequences: int
) -> None:
    node = await proxy.node(lambda _: [wait, [EOS]])
    task = asyncio.create_task(proxy.complete(**body))
    await node.expect(m.Decode)
    joined = proxy.cluster.pool.get(node.instance_id)
    assert joined.num_own_sequences == num_sequences
    node.resume.set()
    await task
    await until(lambda: joined.num_own_sequences == 0)


async def test_the_seat_of_a_choice_that_has_ended_is_free(proxy: Any, wait: Any, until: Any) -> None:
    node = await proxy.node(lambda _: {0: [[], wait, [EOS]], 1: [[], [], [EOS]], 2: proxy.ids("red blue")})
    task = asyncio.create_task(proxy.complete(n=3, stop="blue"))
    assert (await node.expect(m.Abort)).choice == 2
    assert proxy.cluster.pool.get(node.instance_id).num_own_sequences == 2
    node.resume.set()
    assert len((await task)["choices"]) == 3


async def test_too_many_sequences_for_every_node_there_is(proxy: Any, until: Any) -> None:
    """Without a node nobody knows, so that one waits."""
    waiting = asyncio.create_task(proxy.complete(n=9))
    await until(lambda: proxy.cluster.admission.num_waiting == 1)
    small = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    status, reply = await proxy.post("/v1/completions", {"prompt": "x", "best_of": 9})
    assert (status, reply["error"]["param"]) == (400, "best_of")
    assert reply["error"]["message"].startswith("best_of is 9, must be at most 8: ")
    assert (await proxy.complete(n=8))["choices"][7]["text"] == "Hello"  # does not wait behind the other
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]], max_num_seqs=16)
    assert len((await waiting)["choices"]) == 9
    assert small.count(m.Decode) == 1


async def test_many_choices_and_nothing_is_held(proxy: Any) -> None:
    """`Proxy.close` asserts that every seat was given back."""
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]], max_num_seqs=128)
    reply = await proxy.complete(prompt=["x"] * 8, n=128)
    assert [choice["index"] for choice in reply["choices"]] == list(range(1024))
    assert node.count(m.Decode) == 8
