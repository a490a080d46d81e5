"""prompt_logprobs through a whole proxy: their shape, and that they are whole whatever is lost on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common import messages as m
from proxy.prompt_logprobs import PromptLogprobs

EOS = 2
CHAT = "/v1/chat/completions"


def expected(proxy: Any, token_ids: list[int], count: int) -> list[Any]:
    """What the scripted node's numbers look like in a reply."""
    found: list[Any] = [None]
    for place, token_id in enumerate(token_ids[1:], 1):
        entries = {token_id: (-float(place), 10 + place)}
        entries |= {100 + i: (-0.25, 1 + i) for i in range(count) if 100 + i != token_id}
        found.append(
            {
                str(i): {"logprob": logprob, "rank": rank, "decoded_token": proxy.tokenizer.token_text(i)}
                for i, (logprob, rank) in entries.items()
            }
        )
    return found


async def silent_node(proxy: Any) -> Any:
    """One that says nothing by itself."""
    node = await proxy.node()
    node.is_accepting = False
    return node


@pytest.mark.parametrize("count", [0, 2])
async def test_completions_have_them_in_each_choice(proxy: Any, count: int) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    prompts = [[5, 6, 7, 8, 9, 10], [7], [8, 101]]
    reply = await proxy.complete(prompt=prompts, prompt_logprobs=count, n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for index, choice in enumerate(reply["choices"]):
        assert choice["prompt_logprobs"] == expected(proxy, prompts[index // 2], count)
    assert "prompt_logprobs" not in reply


async def test_chat_has_them_once(proxy: Any) -> None:
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    reply = await proxy.chat(prompt_logprobs=1, n=2)
    prompt = (await node.expect(m.Decode)).prompt_token_ids
    assert reply["prompt_logprobs"] == expected(proxy, prompt, 1)
    assert not any("prompt_logprobs" in choice for choice in reply["choices"])


async def test_they_are_absent_where_nobody_asked(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert "prompt_logprobs" not in await proxy.chat()
    assert "prompt_logprobs" not in (await proxy.complete())["choices"][0]


async def test_numbers_that_json_has_not(proxy: Any) -> None:
    node = await silent_node(proxy)
    task = asyncio.create_task(proxy.complete(prompt=[5, 6], prompt_logprobs=1))
    decode = await node.expect(m.Decode)
    entry = m.TokenLogprobs(float("-inf"), [7], [float("nan")], 400)
    await node.output(decode, index=0, prompt_logprobs=[entry], prompt_start=1)
    await node.output(decode, index=0, token_ids=[EOS], finish_reason="stop")
    shown = (await task)["choices"][0]["prompt_logprobs"][1]
    assert {key: (value["logprob"], value["rank"]) for key, value in shown.items()} == {
        "6": (-9999.0, 400),
        "7": (-9999.0, 1),
    }


async def test_a_lost_piece_is_asked_for_and_taken_once(proxy: Any) -> None:
    node = await silent_node(proxy)
    task = asyncio.create_task(proxy.complete(prompt=[5, 6, 7, 8], prompt_logprobs=0))
    decode = await node.expect(m.Decode)
    first, second, third = (m.TokenLogprobs(-float(i), rank=i) for i in (1, 2, 3))
    await node.output(decode, index=0, prompt_logprobs=[first], prompt_start=1)
    await node.output(decode, index=0, prompt_logprobs=[third], prompt_start=3)
    resend = await node.expect(m.Resend)
    assert (resend.leg, resend.choice, resend.from_index) == (1, 0, 0)
    await node.output(decode, index=0, prompt_logprobs=[first], prompt_start=1)
    await node.output(decode, index=0, token_ids=[9, EOS], finish_reason="stop")  # too early, comes again
    resend = await node.expect(m.Resend, 2)
    assert (resend.choice, resend.from_index) == (0, 0)
    await node.output(decode, index=0, prompt_logprobs=[second, third], prompt_start=2)
    await node.output(decode, index=0, prompt_logprobs=[third], prompt_start=3)
    await node.output(decode, index=0, token_ids=[9, EOS], finish_reason="stop")
    reply = await task
    ranks = [next(iter(entry.values()))["rank"] for entry in reply["choices"][0]["prompt_logprobs"][1:]]
    assert ranks == [1, 2, 3]
    assert reply["usage"]["completion_tokens"] == 1
    assert node.count(m.Resend) == 2


async def test_any_one_lost_message_changes_nothing(proxy: Any) -> None:
    """Accepted, three pieces, three outputs of two choices."""
    prompt = [5, 6, 7, 8, 9, 10]
    node = await proxy.node(lambda _: [*proxy.ids("the ", "fox"), [EOS]])
    right = (await proxy.complete(prompt=prompt, prompt_logprobs=1, n=2))["choices"]
    send = node.send
    for lost in range(7):
        count = 0

        async def lossy(message: Any, lost: int = lost, **options: Any) -> None:
            nonlocal count
            if not isinstance(message, m.Status | m.Hello):
                if count == lost:
                    node.drop_next()
                count += 1
            await send(message, **options)

        node.send = lossy
        assert (await proxy.complete(prompt=prompt, prompt_logprobs=1, n=2))["choices"] == right
        assert count > lost


async def test_failure_of_the_node_before_they_are_complete(proxy: Any) -> None:
    node = await silent_node(proxy)
    task = asyncio.create_task(proxy.post("/v1/completions", {"prompt": [5, 6, 7], "prompt_logprobs": 1}))
    decode = await node.expect(m.Decode)
    await node.output(decode, index=0, finish_reason="error", error="out of memory")
    assert (await task)[0] == 500
    assert node.count(m.Resend) == 0


async def test_a_new_leg_begins_them_anew(proxy: Any) -> None:
    a = await silent_node(proxy)
    task = asyncio.create_task(proxy.complete(prompt=[5, 6, 7, 8], prompt_logprobs=0))
    decode = await a.expect(m.Decode)
    await a.output(decode, index=0, prompt_logprobs=[m.TokenLogprobs(-9.0, rank=99)], prompt_start=1)
    b = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    await a.send(m.Goodbye())
    shown = (await task)["choices"][0]["prompt_logprobs"]
    assert shown == expected(proxy, [5, 6, 7, 8], 0)
    assert (await b.expect(m.Decode)).params.prompt_logprobs == 0


async def test_a_new_leg_does_not_ask_for_those_that_are_there(proxy: Any, wait: Any, until: Any) -> None:
    a = await proxy.node(lambda _: [*proxy.ids("the "), wait])
    task = asyncio.create_task(proxy.complete(prompt=[5, 6, 7, 8], prompt_logprobs=0))
    missing = {0: len(proxy.tokenizer.encode("the "))}
    await until(lambda: any(request.missing == missing for request in proxy.cluster._requests.values()))
    b = await proxy.node(lambda _: [*proxy.ids("the ", "fox"), [EOS]])
    await a.send(m.Goodbye())
    choice = (await task)["choices"][0]
    assert choice["text"] == "the fox"
    assert choice["prompt_logprobs"] == expected(proxy, [5, 6, 7, 8], 0)
    assert (await a.expect(m.Decode)).params.prompt_logprobs == 0
    assert (await b.expect(m.Decode)).params.prompt_logprobs is None


def test_more_than_there_can_be_is_cut() -> None:
    entries = [m.TokenLogprobs(-float(i)) for i in range(5)]
    logprobs = PromptLogprobs(3)
    assert logprobs.add(1, entries)
    assert (logprobs.entries, logprobs.is_complete) == (entries[:3], True)
    assert logprobs.add(9, entries)  # nothing is missing
    logprobs.restart()
    assert logprobs.is_complete
