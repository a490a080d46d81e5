"""Where answers end, through a whole proxy: many tokens a message, stops that are included, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest

CHAT = "/v1/chat/completions"
EOS = 2
LETTERS = b"abcdefgh"


async def described(proxy: Any, *, stream: bool, **body: Any) -> tuple[Any, ...]:
    """Text, text of the logprobs' tokens, ids, usage, why and by what it ended: of a chat answer."""
    body = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, **body}
    if stream:
        result = await proxy.stream(CHAT, stream_options={"include_usage": True}, **body)
        choices, text, usage = result.choices(), result.joined(), result.chunks[-1]["usage"]
    else:
        result = await proxy.chat(**body)
        choices, usage = result["choices"], result["usage"]
        text = choices[0]["message"]["content"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    tokens = [bytes(entry["bytes"]).decode("utf-8", "replace") for entry in entries]
    return text, tokens, ids, usage["completion_tokens"], choices[-1]["finish_reason"], choices[-1]["stop_reason"]


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_m12_many_tokens_a_step_change_nothing(proxy: Any, stream: bool, includes: bool) -> None:
    """The cap was looked at before the stop, and only the last token was searched: text behind the stop leaked.

    Six tokens in one message as a speculating node sends them, the stop string, the end token and the cap at every
    place: the answer is the one of a token in each message, and the earliest of the three ends it.
    """
    letters = [i for [i] in proxy.bytes_ids(LETTERS[:6])]
    script: list[list[int]] = []
    await proxy.node(lambda _: script)
    for stop_at in range(6):
        for end_at in range(6):
            for cap in (1, 3, 5, 6):
                ids = [*letters[:end_at], EOS, *letters[end_at + 1 :]]
                stop = LETTERS[stop_at : stop_at + 1].decode()
                body = {"stop": stop, "max_tokens": cap, "include_stop_str_in_output": includes}
                script[:] = [ids]
                together = await described(proxy, stream=stream, **body)
                script[:] = [[token_id] for token_id in ids]
                assert together == await described(proxy, stream=stream, **body)
                assert together == expected(ids, stop_at, end_at, cap, includes=includes)


def expected(ids: list[int], stop_at: int, end_at: int, cap: int, *, includes: bool) -> tuple[Any, ...]:
    if stop_at < min(end_at, cap):
        reason, by, num_tokens, num_ids = (
            "stop",
            LETTERS[stop_at : stop_at + 1].decode(),
            stop_at + includes,
            stop_at + 1,
        )
    elif end_at < cap:
        reason, by, num_tokens, num_ids = "stop", None, end_at, end_at + 1
    else:
        reason, by, num_tokens, num_ids = "length", None, cap, cap
    text = LETTERS[:num_tokens].decode()
    return text, list(text), ids[:num_ids], num_tokens, reason, by


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("includes", "text"), [(False, "🙂 fine "), (True, "🙂 fine END")])
async def test_a_stop_string_over_token_borders(
    proxy: Any, together: bool, stream: bool, includes: bool, text: str
) -> None:
    """Every byte is a token."""
    steps = proxy.bytes_ids("🙂 fine END! more".encode())
    ids = [i for [i] in steps]
    await proxy.node(lambda _: [ids] if together else steps)
    found = await described(proxy, stream=stream, stop=["END"], include_stop_str_in_output=includes)
    num_tokens = len(text.encode())
    assert found[0] == text
    assert (len(found[1]), found[3]) == (num_tokens, num_tokens)
    assert found[2] == ids[: len("🙂 fine END".encode())]
    assert found[4:] == ("stop", "END")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_goes_on_after_an_included_stop_is_cut(proxy: Any, stream: bool) -> None:
    [fox] = [i for i in range(proxy.tokenizer.num_tokens) if proxy.tokenizer.piece(i).data == b" fox"]
    await proxy.node(lambda _: [[fox], *proxy.ids(" more")])
    found = await described(proxy, stream=stream, stop="fo", include_stop_str_in_output=True)
    assert found == (" fo", [" fox"], [fox], 1, "stop", "fo")


async def test_an_included_stop_holds_nothing_back(proxy: Any, wait: Any) -> None:
    """What may begin it is sent at once; without it that would wait."""
    node = await proxy.node(lambda _: [*proxy.ids("fine EN"), wait, *proxy.ids("D!")])
    seen = ""
    async for frame in proxy.frames(stop="END", include_stop_str_in_output=True):
        seen += frame["choices"][0]["text"]
        if seen == "fine EN":
            node.resume.set()
    assert seen == "fine END"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("special", ["skipped", "shown"])
async def test_m13_an_included_stop_token(proxy: Any, stream: bool, special: str) -> None:
    [a], [q] = proxy.bytes_ids(b"aQ")
    await proxy.node(lambda decode: [[a], [q if decode.params.stop_token_ids else EOS]])
    body = {"include_stop_str_in_output": True, "skip_special_tokens": special == "skipped"}
    found = await described(proxy, stream=stream, stop_token_ids=[q], **body)
    assert found == ("aQ", ["a", "Q"], [a, q], 2, "stop", q)
    found = await described(proxy, stream=stream, **body)
    end = ["<|im_end|>"] if special == "shown" else []
    assert found == ("".join(["a", *end]), ["a", *end], [a, EOS], 1 + len(end), "stop", None)
