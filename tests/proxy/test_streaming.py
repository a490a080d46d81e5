"""Text as it is streamed and as it is not: the same, whatever the pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common import messages as m

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EOS = 2


async def both(proxy: Any, **body: Any) -> tuple[dict[str, Any], Any]:
    """The plain reply's choice and the stream, which must agree."""
    plain = (await proxy.complete(**body))["choices"][0]
    stream = await proxy.stream(**body)
    assert stream.status == 200
    assert stream.joined() == plain["text"]
    assert stream.finish_reason == plain["finish_reason"]
    return plain, stream


GOLDEN_CHAT = """\
{"id": ID, "object": "chat.completion.chunk", "created": TIME, "model": "tiny", "choices": [{"index": 0, "delta": \
{"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}], "usage": null}
{"id": ID, "object": "chat.completion.chunk", "created": TIME, "model": "tiny", "choices": [{"index": 0, "delta": \
{"content": "Hello"}, "logprobs": null, "finish_reason": null}], "usage": null}
{"id": ID, "object": "chat.completion.chunk", "created": TIME, "model": "tiny", "choices": [{"index": 0, "delta": \
{"content": " there"}, "logprobs": null, "finish_reason": null}], "usage": null}
{"id": ID, "object": "chat.completion.chunk", "created": TIME, "model": "tiny", "choices": [{"index": 0, "delta": {}, \
"logprobs": null, "finish_reason": "stop", "stop_reason": null}], "usage": null}
{"id": ID, "object": "chat.completion.chunk", "created": TIME, "model": "tiny", "choices": [], "usage": \
{"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22, "prompt_tokens_details": {"cached_tokens": 3}}}
"""


async def test_golden_chat_stream(proxy: Any, wait: Any) -> None:
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), wait, *proxy.ids(" there"), wait, [EOS]])
    lines = []
    async for frame in proxy.frames(CHAT, stream_options={"include_usage": True}):
        if frame["choices"] and frame["choices"][0]["delta"].get("content"):
            node.resume.set()
        frame |= {"id": "ID" if frame["id"].startswith("chatcmpl-") else "?", "created": frame["created"] // 10**9}
        lines.append(json.dumps(frame).replace('"id": "ID"', '"id": ID').replace('"created": 1', '"created": TIME'))
    assert "\n".join(lines) + "\n" == GOLDEN_CHAT


async def test_framing(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello", " there"), [EOS]])
    stream = await proxy.stream(CHAT)
    assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
    frames = stream.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)


async def test_golden_completion_reply(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    reply = await proxy.complete()
    assert {key: reply[key] for key in ("object", "model", "choices")} == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    }
    assert reply["id"].startswith("cmpl-")


async def test_s02_prompt_that_ends_inside_a_character(proxy: Any) -> None:
    """The prompt's text came again with the first delta."""
    prompt = [*proxy.tokenizer.encode("abc "), *[i for [i] in proxy.bytes_ids("日".encode()[:2])]]
    await proxy.node(lambda _: [*proxy.bytes_ids("日".encode()[2:]), *proxy.ids("fox"), [EOS]])
    plain, stream = await both(proxy, prompt=prompt)
    assert plain["text"] == "日fox"
    assert stream.deltas()[0] in ("日", "日fox")


async def test_s03_a_byte_that_is_no_text(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("ok "), *proxy.bytes_ids(b"\x85"), *proxy.ids(" done"), [EOS]])
    plain, _ = await both(proxy)
    assert plain["text"] == "ok \ufffd done"


async def test_a_cut_character_is_flushed_once(proxy: Any) -> None:
    await proxy.node(lambda _: proxy.bytes_ids("ab🙂".encode()))
    plain, _ = await both(proxy, max_tokens=4)
    assert plain["text"] == "ab\ufffd"
    assert plain["finish_reason"] == "length"


@pytest.mark.parametrize(("second", "text", "reason"), [("D! more", "fine ", "stop"), ("X", "fine ENX", "stop")])
async def test_s05_stop_string_in_pieces(proxy: Any, second: str, text: str, reason: str) -> None:
    await proxy.node(lambda _: [*proxy.ids("fine ", "EN", second), [EOS]])
    plain, stream = await both(proxy, stop=["END!"])
    assert plain["text"] == text
    assert plain["finish_reason"] == reason
    assert plain["stop_reason"] == ("END!" if text == "fine " else None)
    assert "EN" not in "".join(stream.deltas()) or text.endswith("ENX")


async def test_s06_stop_phrase_of_many_tokens(proxy: Any, wait: Any) -> None:
    """And the node is told at once."""
    node = await proxy.node(lambda _: [*proxy.ids("a ", "red", " blue"), wait, *proxy.ids(" after")])
    plain, _ = await both(proxy, stop="red blue")
    assert plain["text"] == "a "
    assert plain["finish_reason"] == "stop"
    await node.expect(m.Abort, 2)
    assert not node.running


async def test_s07_usage_only_when_asked(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    counts = []
    for options in ({}, {"include_usage": False}, {"include_usage": True}, None):
        stream = await proxy.stream(CHAT, stream_options=options)
        counts.append(sum(bool(chunk.get("usage")) for chunk in stream.chunks))
    assert counts == [0, 0, 1, 0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_s08_the_usage_chunk_has_no_choices_and_ends_the_stream(proxy: Any, path: str, caplog: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    stream = await proxy.stream(path, stream_options={"include_usage": True})
    assert stream.chunks[-1]["choices"] == []  # `chunks` asserts that [DONE] follows
    assert stream.chunks[-1]["usage"]["completion_tokens"] == len(proxy.tokenizer.encode("Hello"))
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in stream.chunks[:-1])
    assert not [record for record in caplog.records if record.exc_info]


async def test_masked_tokens_are_strict_json(proxy: Any) -> None:
    """V-12: the client's parsers refuse NaN and Infinity."""
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    reply = await proxy.chat(logprobs=True, top_logprobs=5)
    content = reply["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    stream = await proxy.stream(CHAT, logprobs=True, top_logprobs=5)
    streamed = [e for c in stream.choices() if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content
    legacy = await proxy.complete(logprobs=5)
    assert len(legacy["choices"][0]["logprobs"]["tokens"]) == len(content)


@pytest.mark.parametrize("end", ["stop_token", "stop_string", "eos", "length"])
@pytest.mark.parametrize("stream", [False, True])
async def test_m13_ids_logprobs_text_and_usage_describe_the_same_tokens(proxy: Any, end: str, stream: bool) -> None:
    visible = [i for [i] in proxy.bytes_ids(b"abc")]
    [stop_token], *_ = proxy.bytes_ids(b"Q")
    tails = {
        "stop_token": ([[stop_token]], {"stop_token_ids": [stop_token]}),
        "stop_string": (proxy.bytes_ids(b"QR"), {"stop": "QR"}),
        "eos": ([[EOS]], {}),
        "length": ([[stop_token]], {"max_tokens": 3}),
    }
    tail, extra = tails[end]
    await proxy.node(lambda _: [*[[i] for i in visible], *tail, *proxy.ids(" more")])
    body = {"logprobs": True, "top_logprobs": 1, **extra}
    if stream:
        result = await proxy.stream(CHAT, stream_options={"include_usage": True}, **body)
        entries = [e for c in result.choices() if c["logprobs"] for e in c["logprobs"]["content"]]
        text, usage = result.joined(), result.chunks[-1]["usage"]
    else:
        result = await proxy.chat(**body)
        choice = result["choices"][0]
        entries, text, usage = choice["logprobs"]["content"], choice["message"]["content"], result["usage"]
    assert text == "abc"
    assert [e["token"] for e in entries] == ["a", "b", "c"]
    assert usage["completion_tokens"] == 3


async def test_ids_without_a_token(proxy: Any) -> None:
    """L-11: the output layer is wider than the tokenizer."""
    await proxy.node(lambda _: [*proxy.ids("Hello"), [511], *proxy.ids(" there"), [EOS]])
    reply = await proxy.complete(logprobs=3)
    assert reply["choices"][0]["text"] == "Hello there"
    assert json.dumps(reply)
    stream = await proxy.stream(CHAT, logprobs=True, top_logprobs=3)
    assert stream.joined() == "Hello there"


async def test_every_prompt_is_a_choice(proxy: Any) -> None:
    def script(decode: Any) -> Any:
        return [*proxy.ids("Hello" if decode.prompt_token_ids == proxy.tokenizer.encode("a") else " world"), [EOS]]

    await proxy.node(script)
    reply = await proxy.complete(prompt=["a", "b"])
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "Hello"), (1, " world")]
    assert reply["usage"]["prompt_tokens"] == 2
    stream = await proxy.stream(prompt=[proxy.tokenizer.encode("a"), proxy.tokenizer.encode("b")])
    assert [stream.joined(0), stream.joined(1)] == ["Hello", " world"]


async def test_special_tokens_are_shown_when_asked(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [1], *proxy.ids(" there"), [EOS]])
    assert (await proxy.complete())["choices"][0]["text"] == "Hello there"
    shown = await proxy.complete(skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "Hello<|im_start|> there"


async def test_token_ids_include_what_ended_the_answer(proxy: Any) -> None:
    hello = proxy.tokenizer.encode("Hello")
    await proxy.node(lambda _: [hello, [EOS]])
    reply = await proxy.complete(return_token_ids=True)
    assert reply["choices"][0]["token_ids"] == [*hello, EOS]
    stream = await proxy.stream(return_token_ids=True)
    assert [i for choice in stream.choices() for i in choice["token_ids"]] == [*hello, EOS]


async def test_official_client(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello", " there"), [EOS]])
    messages = [{"role": "user", "content": "Hi"}]
    async with proxy.sdk() as client:
        reply = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
        assert reply.choices[0].message.content == "Hello there"
        assert reply.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
        assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
        assert chunks[0].choices[0].delta.role == "assistant"
        legacy = await client.completions.create(model="tiny", prompt="x")
        assert legacy.choices[0].text == "Hello there"
        assert [entry.id async for entry in await client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
