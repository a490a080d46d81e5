"""Answers of the real service that must match: each kind, split and not, seeded, preempted, and when a node dies."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "tea", "go"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 40, "maxItems": 60}
SEEDED = {"temperature": 1.2, "top_p": 0.95, "seed": 77}
PROMPT = "Describe a person as JSON:\n"


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def check_person(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "age", "hobbies"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 20
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 150
    assert 1 <= len(found["hobbies"]) <= 3
    assert set(found["hobbies"]) <= {"chess", "tea", "go"}


def check_numbers(text: str) -> None:
    found = json.loads(text)
    assert 40 <= len(found) <= 60
    assert all(type(number) is int and 0 <= number <= 999 for number in found)


def finished(answer: dict[str, Any]) -> str:
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


def chat(client: Any, **fields: Any) -> str:
    messages = [{"role": "user", "content": "Tell me about a person who likes tea."}]
    reply = client.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 300, **fields})
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


def test_chat_answers_match_their_schema(split: Any) -> None:
    check_person(chat(split, response_format=as_format(SCHEMA), temperature=0))
    for seed in range(4):
        check_person(chat(split, response_format=as_format(SCHEMA), temperature=1.5, seed=seed))
    split.assert_pools_idle()


def test_regex_choice_and_grammar(split: Any) -> None:
    fields = {"max_tokens": 200, "temperature": 1.0, "seed": 3}
    date = finished(split.complete("The day was ", structured_outputs={"regex": r"(19|20)\d\d-[01]\d"}, **fields))
    assert re.fullmatch(r"(19|20)\d\d-[01]\d", date)
    assert finished(split.complete("Yes or no? ", guided_choice=["yes", "no", "perhaps"], **fields)) in {
        "yes",
        "no",
        "perhaps",
    }
    total = finished(split.complete("1+1 = ", guided_grammar='root ::= [0-9] ("+" [0-9]){2,4}', **fields))
    assert re.fullmatch(r"\d(\+\d){2,4}", total)


def test_any_json_object(split: Any) -> None:
    answer = split.complete('{"a": 1}\n{"b": 2}\n', response_format={"type": "json_object"}, max_tokens=400, stop=None)
    [choice] = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    else:
        assert choice["text"].startswith("{")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SEEDED], ids=["greedy", "seeded"])
def test_the_same_tokens_split_and_not_alone_and_beside_others(
    split: Any, single: Any, together: Any, sampling: dict[str, Any]
) -> None:
    fields = {"response_format": as_format(SCHEMA), "max_tokens": 200, **sampling}
    alone = split.complete(PROMPT, **fields)
    check_person(finished(alone))
    right = alone["choices"][0]["token_ids"]
    assert single.token_ids(PROMPT, **fields) == right
    others = [lambda i=i: split.token_ids(f"{i} times", max_tokens=30, seed=i, temperature=1) for i in range(3)]
    others += [lambda: split.token_ids("Yes? ", guided_choice=["yes", "no"], temperature=1, seed=5)]
    in_batch, *_ = together(lambda: split.token_ids(PROMPT, **fields), *others)
    assert in_batch == right


def test_streamed_answers_match_too(split: Any) -> None:
    body = {"prompt": PROMPT, "response_format": as_format(SCHEMA), "max_tokens": 200, "stream": True, **SEEDED}
    text = ""
    with split.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    check_person(text)


def test_what_is_no_grammar_is_a_400_and_the_service_lives(split: Any) -> None:
    for body, param, complaint in (
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"response_format": as_format({"type": "nope"})}, "response_format.json_schema.schema", "Invalid type: nope"),
        ({"structured_outputs": {"grammar": 'start: start "a"'}}, "structured_outputs.grammar", "grammar"),
    ):
        reply = split.http.post("/v1/completions", json={"prompt": "x", **body})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert complaint in reply.json()["error"]["message"]
    assert split.token_ids("Still there?", max_tokens=2)
    split.assert_pools_idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_answers_match(own_service: Any, single: Any, together: Any, mode: str) -> None:
    """A pool that holds half of what is asked for at once."""
    flags = ["--num-gpu-blocks-override", "40", "--max-model-len", "400", "--swap-space", "64MiB"]
    client = own_service(node_flags=[*flags, "--preemption-mode", mode])

    def ask(asked: Any, number: int) -> dict[str, Any]:
        fields = {"response_format": as_format(NUMBERS), "max_tokens": 350, "temperature": 1.0, "seed": number}
        return dict(asked.complete(f"{number} and so on: ", **fields))

    answers = together(*[lambda i=i: ask(client, i) for i in range(6)])
    for answer in answers:
        check_numbers(finished(answer))
    [decode] = [node for node in client.service.nodes if node.role == "decode"]
    assert client.metric(decode, "vllm:num_preemptions_total") > 0
    for number in (0, 5):
        assert answers[number]["choices"][0]["token_ids"] == ask(single, number)["choices"][0]["token_ids"]
    client.assert_pools_idle()


def test_a_decode_node_killed_in_mid_stream(own_service: Any, single: Any) -> None:
    """The one that takes over builds the state of the grammar from the outputs."""
    client = own_service(num_prefill=1, num_decode=2)
    victims = [n for n in client.service.nodes if n.role == "decode"]
    fields = {"prompt": "Numbers: ", "response_format": as_format(NUMBERS), "max_tokens": 350, **SEEDED}
    has_begun, is_killed = threading.Event(), threading.Event()

    def kill_the_busy_one() -> None:
        has_begun.wait(60)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not is_killed.is_set():
            for node in victims:
                if client.metric(node, "vllm:num_requests_running"):
                    node.kill(signal.SIGKILL)
                    is_killed.set()
                    return

    killer = threading.Thread(target=kill_the_busy_one)
    killer.start()
    text, finish, token_ids = "", None, []
    with client.http.stream("POST", "/v1/completions", json={**fields, "stream": True, "return_token_ids": True}) as r:
        for line in r.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                token_ids += choice.get("token_ids") or []
                finish = choice["finish_reason"] or finish
                if len(text) > 20:
                    has_begun.set()
    killer.join()
    assert is_killed.is_set(), "the answer was over before a node died"
    assert any(n.process.poll() is not None for n in victims)
    assert finish == "stop"
    check_numbers(text)
    fields.pop("prompt")
    assert token_ids == single.token_ids("Numbers: ", **fields)
    client.assert_pools_idle()
