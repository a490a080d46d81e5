"""What is refused, with which status and code, and what a null means. Nothing refused reaches a node."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from common import messages as m

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
EOS = 2
CONTEXT = 2048
OPTIONAL = [
    "model max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos n logit_bias presence_penalty",
    "frequency_penalty repetition_penalty min_tokens logprobs stream stream_options user priority cache_salt",
    "skip_special_tokens use_beam_search beam_width length_penalty early_stopping best_of",
    "prompt_logprobs allowed_token_ids bad_words include_stop_str_in_output",
]
OPTIONAL_FIELDS = " ".join(OPTIONAL).split()


@pytest.fixture
async def hello(proxy: Any) -> Any:
    """A node that always says Hello."""
    return await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])


async def refused(proxy: Any, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    got, reply = await proxy.post(path, body)
    assert got == status, reply
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return dict(error)


@pytest.mark.parametrize("field", [*OPTIONAL_FIELDS, "echo", "suffix"])
async def test_null_is_the_default_in_completions(proxy: Any, hello: Any, field: str) -> None:
    """V-01."""
    await proxy.complete(**{field: None})


@pytest.mark.parametrize(
    "field",
    [*OPTIONAL_FIELDS, "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "response_format"],
)
async def test_null_is_the_default_in_chat(proxy: Any, hello: Any, field: str) -> None:
    """V-01."""
    await proxy.chat(**{field: None})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -7}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 9}, "n"),  # more than the node runs
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"seed": 2**70}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1001}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": -100.5}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 512]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["word", ""]}, "bad_words"),
        ({"bad_words": ["x" * 129]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
    ],
)
async def test_values_that_are_refused(proxy: Any, hello: Any, body: dict[str, Any], param: str) -> None:
    error = await refused(proxy, COMPLETIONS, {"prompt": "x", **body})
    assert error["param"] == param
    assert param in error["message"]
    assert hello.count(m.Decode) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 9}, "beam_width"),  # more than the node runs
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"best_of": 3, "beam_width": 2}, "best_of"),
        ({"length_penalty": 2000}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"stop": "x"}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_p": 0.5}, "top_p"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_what_beams_cannot_have(proxy: Any, hello: Any, body: dict[str, Any], param: str) -> None:
    error = await refused(proxy, COMPLETIONS, {"prompt": "x", "use_beam_search": True, **body})
    assert error["param"] == param
    assert param in error["message"]
    assert hello.count(m.Decode) == 0


async def test_choices_of_all_prompts_have_a_limit(proxy: Any) -> None:
    node = await proxy.node(lambda _: [[EOS]], max_num_seqs=16)
    beams = {"use_beam_search": True, "beam_width": 9}
    for asked, field in (({"n": 9}, "n"), ({"n": 2, "best_of": 9}, "best_of"), (beams, "beam_width")):
        error = await refused(proxy, COMPLETIONS, {"prompt": ["a"] * 114, **asked})
        words = f"{field} is 9, which makes 1026 sequences of 114 prompts, at most 1024 are allowed in one request"
        assert (error["param"], error["message"]) == (field, words)
    assert node.count(m.Decode) == 0
    assert len((await proxy.complete(prompt=["a"] * 113, n=9))["choices"]) == 1017


async def test_beams_are_limited_also_where_the_nodes_are_not(proxy: Any) -> None:
    node = await proxy.node(max_num_seqs=64)
    error = await refused(proxy, COMPLETIONS, {"prompt": "x", "use_beam_search": True, "beam_width": 33})
    assert error["message"] == "beam_width is 33, must be from 1 to 32"
    assert node.count(m.Decode) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_chat_values_that_are_refused(proxy: Any, hello: Any, body: dict[str, Any], param: str) -> None:
    error = await refused(proxy, CHAT, {"messages": HI, **body})
    assert error["param"] == param
    assert hello.count(m.Decode) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"stop_token_ids": [10**9], "min_tokens": 1},
        {"stop_token_ids": [512]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"10000000": 5}},
        {"logit_bias": {"-3": 1}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": 1000}},
    ],
)
async def test_ids_out_of_range(proxy: Any, hello: Any, body: dict[str, Any]) -> None:
    """M-11: nothing reaches a node, a neighbour is unchanged. The field, its value and the limit are named."""
    error, reply = await asyncio.gather(refused(proxy, COMPLETIONS, {"prompt": "x", **body}), proxy.complete())
    assert error["param"] in body
    value = str(next(iter(body.values()))).strip("[]{}").split(":")[-1 if "1000" in str(body) else 0].strip(" '")
    assert value in error["message"]
    assert re.search("511|100|token ids", error["message"])
    assert reply["choices"][0]["text"] == "Hello"
    assert hello.count(m.Decode) == 1


async def test_prompt_over_the_context(proxy: Any, hello: Any) -> None:
    """V-06."""
    for prompt in ([5] * (CONTEXT + 1), "x " * (CONTEXT + 1)):
        error = await refused(proxy, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 1) in (await refused(proxy, COMPLETIONS, {"prompt": [5] * (CONTEXT + 1)}))["message"]
    error = await refused(proxy, CHAT, {"messages": [{"role": "user", "content": "x " * CONTEXT}]})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


async def test_a_text_that_cannot_fit_is_not_tokenized(proxy: Any, hello: Any, monkeypatch: Any) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError("was tokenized")

    monkeypatch.setattr(proxy.tokenizer, "encode", fail)
    error = await refused(proxy, COMPLETIONS, {"prompt": "word " * 10**5})
    assert error["code"] == "context_length_exceeded"


async def test_prompt_and_answer_over_the_context(proxy: Any, hello: Any) -> None:
    """V-06."""
    error = await refused(proxy, COMPLETIONS, {"prompt": [5] * 100, "max_tokens": CONTEXT - 99})
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 1) in error["message"]
    await proxy.complete(prompt=[5] * 100, max_tokens=CONTEXT - 100)


async def test_text_parts_are_the_joined_string(proxy: Any, hello: Any) -> None:
    """V-07."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    await proxy.chat(messages=[{"role": "user", "content": parts}])
    await proxy.chat(messages=[{"role": "user", "content": "Hello\nthere"}])
    first, second = await hello.expect(m.Decode), await hello.expect(m.Decode, 2)
    assert first.prompt_token_ids == second.prompt_token_ids
    text = proxy.tokenizer.decode(first.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHello\nthere<|im_end|>\n<|im_start|>assistant\n"


async def test_an_image_is_refused_and_not_fetched(proxy: Any, hello: Any) -> None:
    """O-13, V-07."""
    visits = []
    server = await asyncio.start_server(lambda *_: visits.append(1), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for part in (
        {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/x"}},
        {"type": "hologram", "hologram": "x"},
    ):
        error = await refused(proxy, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert part["type"] in error["message"]
    server.close()
    await server.wait_closed()
    assert not visits


async def test_unknown_model(proxy: Any, hello: Any) -> None:
    """V-13."""
    for path, rest in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        error = await refused(proxy, path, {"model": "no-such-model", **rest}, 404)
        assert error["code"] == "model_not_found"
    async with proxy.sdk() as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="no-such-model", messages=HI)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no-such-model")
    assert (await proxy.complete(model=None))["model"] == "tiny"  # the reply states the real name


async def test_chat_without_a_limit_runs_to_the_context(proxy: Any) -> None:
    """V-14."""
    await proxy.node(lambda _: [[5] * 500] * 10)
    reply = await proxy.chat(ignore_eos=True)
    usage = reply["usage"]
    assert usage["completion_tokens"] == CONTEXT - usage["prompt_tokens"]
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_limits_of_an_answer(proxy: Any) -> None:
    """V-14: the newer name wins; completions have their documented default."""
    await proxy.node(lambda _: [[5] * 500])
    assert (await proxy.chat(max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await proxy.chat(max_tokens=9))["usage"]["completion_tokens"] == 9
    assert (await proxy.complete(max_tokens=None))["usage"]["completion_tokens"] == 16
    near_end = await proxy.complete(max_tokens=None, prompt=[5] * (CONTEXT - 4))
    assert near_end["usage"]["completion_tokens"] == 4


async def test_parameters_reach_the_node(proxy: Any, hello: Any) -> None:
    await proxy.complete(
        prompt=[5, 6], temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, stop_token_ids=[9], ignore_eos=True,
        logprobs=2, priority=3, cache_salt="tenant", user="me", max_tokens=1,
    )  # fmt: skip
    decode = await hello.expect(m.Decode)
    params = decode.params
    assert decode.prompt_token_ids == [5, 6]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.stop_token_ids, params.ignore_eos, params.logprobs) == (11, (9,), True, 2)
    assert (params.max_tokens, decode.priority, decode.cache_salt) == (1, 3, "tenant")


async def test_parameters_of_the_logits_reach_the_node(proxy: Any, hello: Any) -> None:
    await proxy.complete(
        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2, logit_bias={"5": 1, "7": -2.5},
        min_tokens=3, allowed_token_ids=[5, 6, 7], stop_token_ids=[9], max_tokens=8,
    )  # fmt: skip
    params = (await hello.expect(m.Decode)).params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1.0, 1.2)
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert (params.min_tokens, params.allowed_token_ids, params.stop_token_ids) == (3, (5, 6, 7), (9,))


async def test_bad_words_reach_the_node_as_they_are_spelled(proxy: Any, hello: Any) -> None:
    """At the start of a text and after a space, each once."""
    await proxy.complete(bad_words=["the quick", " the quick", " "])
    words = (await hello.expect(m.Decode)).params.bad_words_token_ids
    spelled = [tuple(proxy.tokenizer.encode(text)) for text in ("the quick", " the quick", " ")]
    assert list(words) == spelled
    assert len(set(words)) == 3


async def test_a_seed_is_drawn_when_none_came(proxy: Any, hello: Any) -> None:
    await proxy.complete()
    await proxy.complete()
    seeds = [(await hello.expect(m.Decode, i)).params.seed for i in (1, 2)]
    assert None not in seeds
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt":"x","temperature":NaN}']
)
async def test_malformed_json(proxy: Any, hello: Any, body: bytes) -> None:
    async with proxy.http.post(COMPLETIONS, data=body, headers={"Content-Type": "application/json"}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "invalid_request_error"
    await proxy.complete()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/health", 405), ("POST", "//v1/completions", 404)],
)
async def test_unknown_paths_and_methods(proxy: Any, method: str, path: str, status: int) -> None:
    async with proxy.request(method, path) as reply:
        assert reply.status == status
        assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}
        assert reply.headers["X-Request-Id"]
        assert ("Allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", ", did you mean /v1/chat/completions?"),
        ("/completions", ", did you mean /v1/completions?"),
        ("/v1/v1/models", ", did you mean /v1/models?"),
        ("/v1/chat/completions/", ", did you mean /v1/chat/completions?"),
        ("/v1/health", ", did you mean /health?"),
        ("/wp-login.php", ""),
        ("/v1/chat/completions" + "/" * 500, ""),
    ],
)
async def test_a_path_that_is_nearly_right_is_told_the_right_one(proxy: Any, path: str, hint: str) -> None:
    async with proxy.request("POST", path, json={}) as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["message"] == f"there is no {path}{hint}"


async def test_a_body_over_the_cap(start_proxy: Any) -> None:
    proxy = await start_proxy(max_body_bytes=1000)
    error = await refused(proxy, COMPLETIONS, {"prompt": "x" * 2000}, 413)
    assert error["code"] == "request_too_large"

    async def chunked() -> Any:
        for _ in range(10):
            yield b"x" * 500

    async with proxy.http.post(COMPLETIONS, data=chunked()) as reply:  # no declared length
        assert reply.status == 413
        assert (await reply.json())["error"]["code"] == "request_too_large"


async def test_request_id(proxy: Any, hello: Any) -> None:
    for given, kept in (("check-4711", True), ("bad id", False), ("x" * 200, False), (None, False)):
        headers = {} if given is None else {"X-Request-Id": given}
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with proxy.http.post(COMPLETIONS, json=body, headers=headers) as reply:
            assert reply.status == 200
            assert (reply.headers["X-Request-Id"] == given) == kept
            assert reply.headers["X-Request-Id"]
            await reply.read()


async def test_tokenize_and_back(proxy: Any) -> None:
    text = "the quick <|im_start|> 🙂"
    status, reply = await proxy.post("/tokenize", {"prompt": text})
    assert status == 200
    assert reply["tokens"] == proxy.tokenizer.encode(text)
    assert reply["count"] == len(reply["tokens"])
    _, back = await proxy.post("/detokenize", {"tokens": reply["tokens"]})
    assert back == {"prompt": text}
    _, chat = await proxy.post("/tokenize", {"messages": HI})
    assert proxy.tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("assistant\n")
    await refused(proxy, "/detokenize", {"tokens": [10**9]})
    await refused(proxy, "/tokenize", {})


async def test_a_model_without_a_template(proxy: Any, hello: Any, monkeypatch: Any) -> None:
    routes = next(r for r in proxy.app.router.routes() if r.resource.canonical == CHAT)
    monkeypatch.setattr(routes.handler.__self__.model, "_chat_template", None)
    error = await refused(proxy, CHAT, {"messages": HI})
    assert "chat template" in error["message"]


async def test_messages_quote_no_prompt(proxy: Any, hello: Any) -> None:
    """O-07: an error names the field, it does not repeat what the user wrote."""
    secret = "MARKER PHRASE"
    for path, body in ((COMPLETIONS, {"prompt": {"text": secret}}), (CHAT, {"messages": [{"role": secret}]})):
        error = await refused(proxy, path, body)
        assert secret not in json.dumps(error)


async def test_an_error_shows_the_beginning_of_what_was_sent(proxy: Any) -> None:
    status, body = await proxy.post("/v1/completions", {"model": "x" * 100_000, "prompt": "x"})
    assert status == 404
    assert len(body["error"]["message"]) < 500
