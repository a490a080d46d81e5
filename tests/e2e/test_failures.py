"""Bad days: a client that leaves, a node that dies, one that joins late, requests that make no sense."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def leave_after(client: Any, body: dict[str, Any], num_chunks: int) -> None:
    with client.http.stream("POST", "/v1/completions", json={"stream": True, **body}) as reply:
        for index, _ in enumerate(reply.iter_lines()):
            if index >= num_chunks:
                return


def test_client_that_leaves_while_streaming(split: Any) -> None:
    leave_after(split, {"prompt": "Once upon", "max_tokens": 2000, "ignore_eos": True}, 6)
    split.assert_pools_idle(seconds=1.5)


def test_client_that_leaves_during_prefill(split: Any, filler: Any) -> None:
    with pytest.raises(httpx.ReadTimeout):
        split.http.post("/v1/completions", json={"prompt": filler(3000, 1), "max_tokens": 4}, timeout=0.7)
    split.assert_pools_idle(seconds=2.5)  # one second after the step in flight


def test_prefill_node_killed_in_the_middle_of_a_fetch(own_service: Any, single: Any, filler: Any) -> None:
    client = own_service(num_prefill=1)
    prompt = filler(2000, 2)
    right = single.token_ids(prompt, max_tokens=8)
    prefill = next(n for n in client.service.nodes if n.role == "prefill")
    killer = threading.Timer(1.0, prefill.kill, [signal.SIGKILL])
    killer.start()
    answer = client.complete(prompt, max_tokens=8)
    killer.join()
    assert answer["choices"][0]["token_ids"] == right
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt) - 16, "nothing had to be computed"
    client.assert_pools_idle()
    assert client.token_ids(filler(200, 3), max_tokens=4)  # and it goes on without a prefill node


def test_decode_node_killed_in_mid_stream_is_taken_over(own_service: Any, cases: dict[str, Any]) -> None:
    client = own_service(num_prefill=1, num_decode=2)
    case = cases["length_500"]
    victim = [n for n in client.service.nodes if n.role == "decode"]

    def kill_the_busy_one() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for node in victim:
                if client.metric(node, "vllm:num_requests_running"):
                    node.kill(signal.SIGKILL)
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_the_busy_one)
    killer.start()
    case.check(client.token_ids(case.prompt_token_ids))
    killer.join()
    assert any(n.process.poll() is not None for n in victim)
    client.assert_pools_idle()


def test_parts_start_in_any_order_and_late_nodes_are_used(own_parts: Any, connect: Any, filler: Any) -> None:
    service = own_parts()
    service.start_node("decode")
    service.start_node("prefill")
    service.start_proxy()
    service.wait_ready()
    client = connect(service)
    client.token_ids(filler(100, 4), max_tokens=2)
    late = service.start_node("prefill")
    first = next(n for n in service.nodes if n.role == "prefill")
    service.wait_ready()
    first.kill(signal.SIGTERM)
    assert first.process.returncode == 0
    assert client.token_ids(filler(100, 5), max_tokens=2)
    assert client.metric(late, "tandem:fetches_total") >= 1


def test_mismatched_node_is_refused_with_both_values(own_parts: Any) -> None:
    service = own_parts()
    service.start_proxy()
    service.start_node("decode")
    service.wait_ready()
    odd = service.start_node("prefill", "--block-size", "32")
    deadline = time.monotonic() + 60
    while "block_size is 32 here, 16 there" not in odd.log.read_text():
        assert time.monotonic() < deadline, odd.tail()
        time.sleep(0.1)


BAD_BODIES = [
    (b"{", 400),
    (b'{"model": "nope", "prompt": "x"}', 404),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "temperature": "hot"}', 400),
    (b'{"prompt": 7}', 400),
    (b'{"prompt": [99999999]}', 400),
    (b'{"prompt": []}', 400),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES)
def test_bad_request_is_refused_and_the_service_lives(split: Any, body: bytes, status: int) -> None:
    reply = split.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    assert {"message", "type", "param", "code"} <= reply.json()["error"].keys()
    assert split.token_ids("Still there?", max_tokens=2)


def test_prompt_over_the_context(split: Any, filler: Any) -> None:
    reply = split.http.post("/v1/completions", json={"prompt": filler(9000, 0), "max_tokens": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in reply.json()["error"]["message"]
    assert "9000" in reply.json()["error"]["message"] or "9001" in reply.json()["error"]["message"]
