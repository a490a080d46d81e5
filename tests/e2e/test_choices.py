"""Several answers, beams, prompts' log-probabilities from the real service: split as unsplit, and when a node dies."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.service import start_service
from tests.e2e.conftest import MODEL, ONE_THREAD, Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 4711, "ignore_eos": True}
STORY = "text_story"
LOGPROB_TOLERANCE = 2e-3  # the prefill node's chunks add up in another order


@pytest.fixture(scope="module")
def doomed() -> Iterator[Client]:
    """One test kills its prefill node, another one of its two decode nodes; neither needs what the other kills."""
    with start_service(MODEL, num_decode=2, node_flags=ONE_THREAD) as service, Client(service) as client:
        yield client


def answers(client: Any, prompt: list[int], **fields: Any) -> list[list[int]]:
    choices = client.complete(prompt, **fields)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["token_ids"] for choice in choices]


def test_three_answers_split_and_not(split: Any, single: Any, cases: dict[str, Any]) -> None:
    """Cold, then warm; the first one is what a request for one gives."""
    for name in ("length_33", STORY):
        prompt = cases[name].prompt_token_ids
        right = answers(single, prompt, n=3, max_tokens=12, **SEEDED)
        assert len({tuple(outputs) for outputs in right}) == 3
        for _ in ("cold", "warm"):
            assert answers(split, prompt, n=3, max_tokens=12, **SEEDED) == right
        assert split.token_ids(prompt, max_tokens=12, **SEEDED) == right[0]
    split.assert_pools_idle()


def test_three_answers_that_match_a_grammar(split: Any, single: Any) -> None:
    fields = {"n": 3, "temperature": 1.2, "seed": 5, "structured_outputs": {"regex": "[a-z]{4,9}( [a-z]{4,9}){2}"}}
    right = single.complete("Three animals: ", **fields)["choices"]
    assert len({choice["text"] for choice in right}) == 3
    for choice in right:
        assert len(choice["text"].split()) == 3
    found = split.complete("Three animals: ", **fields)["choices"]
    assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in right]


def test_the_best_of_four(split: Any, single: Any, cases: dict[str, Any]) -> None:
    prompt = cases[STORY].prompt_token_ids
    fields = {"max_tokens": 16, "logprobs": 0, **SEEDED}
    every = split.complete(prompt, n=4, **fields)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    best = sorted(every, key=mean, reverse=True)[:2]
    assert best != every[:2], "another seed is needed: the first two are the best"
    for client in (split, single):
        assert answers(client, prompt, n=2, best_of=4, **fields) == [choice["token_ids"] for choice in best]


@pytest.mark.parametrize("name", ["length_17", "chat_unicode"])
def test_beams_split_and_not(split: Any, single: Any, cases: dict[str, Any], name: str) -> None:
    prompt = cases[name].prompt_token_ids
    fields = {"use_beam_search": True, "n": 2, "beam_width": 4, "max_tokens": 12, "logprobs": 1}
    right = single.complete(prompt, **fields)["choices"]
    found = split.complete(prompt, **fields)["choices"]
    assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in right]
    first, second = (sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) for choice in found)
    assert first > second
    greedy = split.complete(prompt, max_tokens=12, logprobs=1)["choices"][0]
    assert first >= sum(greedy["logprobs"]["token_logprobs"]) / len(greedy["token_ids"]) - LOGPROB_TOLERANCE
    split.assert_pools_idle()


# --- prompts ------------------------------------------------------------------------------------------------------


def prompt_logprobs(client: Any, prompt: list[int], **fields: Any) -> list[Any]:
    answer = client.complete(prompt, prompt_logprobs=2, **{"max_tokens": 3, **fields})
    return list(answer["choices"][0]["prompt_logprobs"])


def check_prompt(found: list[Any], right: list[Any], prompt: list[int]) -> None:
    """Entries by token id: the prompt's own token, and the two most likely ones."""
    assert len(found) == len(right) == len(prompt)
    assert found[0] is None
    assert right[0] is None
    for token_id, mine, other in zip(prompt[1:], found[1:], right[1:], strict=True):
        assert mine[str(token_id)]["logprob"] == pytest.approx(other[str(token_id)]["logprob"], abs=LOGPROB_TOLERANCE)
        logprobs = [sorted((entry["logprob"] for entry in entries.values()), reverse=True) for entries in (mine, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("name", ["length_1", "length_17", "length_257"])
def test_prompt_logprobs_split_and_not(split: Any, single: Any, cases: dict[str, Any], name: str) -> None:
    """Cold, warm, and with several answers to the same prompt."""
    prompt = cases[name].prompt_token_ids
    right = prompt_logprobs(single, prompt)
    for fields in ({}, {}, {"n": 2, "temperature": 1.0, "seed": 1}):
        check_prompt(prompt_logprobs(split, prompt, **fields), right, prompt)
    split.assert_pools_idle()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_bytes_fetched(client: Any) -> float:
    return float(sum(client.metric(node, "tandem:transfer_bytes_total") for node in live_decode_nodes(client)))


def live_decode_nodes(client: Any) -> list[Any]:
    return [node for node in client.service.nodes if node.role == "decode" and node.process.poll() is None]


@pytest.mark.slow
def test_prefill_node_killed_while_a_prompt_is_scored(doomed: Any, single: Any, filler: Any) -> None:
    """The decode node computes the rest, and its log-probabilities: each position once."""
    client = doomed
    prompt = filler(1000, 21)
    [prefill] = [node for node in client.service.nodes if node.role == "prefill"]
    num_before = num_bytes_fetched(client)

    def kill_it_halfway() -> None:
        wait_until(lambda: num_bytes_fetched(client) > num_before)
        prefill.kill(signal.SIGKILL)

    killer = threading.Thread(target=kill_it_halfway)
    killer.start()
    answer = client.complete(prompt, prompt_logprobs=2, max_tokens=4)
    killer.join()
    right = single.complete(prompt, prompt_logprobs=2, max_tokens=4)
    assert answer["choices"][0]["token_ids"] == right["choices"][0]["token_ids"]
    check_prompt(answer["choices"][0]["prompt_logprobs"], right["choices"][0]["prompt_logprobs"], prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt) - 16, "it was killed too late"
    client.assert_pools_idle()


# --- a decode node that dies --------------------------------------------------------------------------------------


def streamed(client: Any, prompt: list[int], **fields: Any) -> Iterator[tuple[int, list[int]]]:
    """(choice, token ids) as they come."""
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, **fields}
    with client.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["index"], choice.get("token_ids") or []


def kill_the_busy_decode_node(client: Any) -> None:
    [busy] = [node for node in live_decode_nodes(client) if client.metric(node, "vllm:num_requests_running")]
    busy.kill(signal.SIGKILL)


def test_decode_node_killed_while_three_answers_stream(doomed: Any, single: Any, cases: dict[str, Any]) -> None:
    """Each goes on at the other node where it was: no token again, none left out."""
    client = doomed
    prompt = cases["length_257"].prompt_token_ids
    fields = {"n": 3, "max_tokens": 48, **SEEDED}
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    is_killed = False
    for choice, token_ids in streamed(client, prompt, **fields):
        found[choice] += token_ids
        if not is_killed and all(len(outputs) >= 4 for outputs in found.values()):
            kill_the_busy_decode_node(client)
            is_killed = True
    assert is_killed
    assert list(found.values()) == answers(single, prompt, **fields)
    client.assert_pools_idle()


@pytest.mark.slow
def test_decode_node_killed_while_beams_run(
    own_service: Any, single: Any, cases: dict[str, Any], together: Callable[..., list[Any]]
) -> None:
    """Nothing of a search is told before its end: it begins anew at the other node."""
    client = own_service(num_prefill=1, num_decode=2)
    prompt = cases["length_257"].prompt_token_ids
    fields = {"use_beam_search": True, "n": 2, "beam_width": 4, "max_tokens": 32}

    def kill() -> None:
        decodes = live_decode_nodes(client)
        wait_until(lambda: any(client.metric(node, "vllm:num_requests_running") for node in decodes))
        kill_the_busy_decode_node(client)

    found, _ = together(lambda: answers(client, prompt, **fields), kill)
    assert found == answers(single, prompt, **fields)
    client.assert_pools_idle()
