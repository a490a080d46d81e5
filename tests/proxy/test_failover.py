"""Nodes that die, refuse, lose messages or do not fit; clients that leave. The stream goes on or ends cleanly."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common import messages as m
from proxy.admission import AdmissionLimits
from proxy.dispatcher import DispatchLimits

EOS = 2
TEXT = ["the ", "quick ", "brown ", "fox"]


async def follow(proxy: Any, text: list[str], **body: Any) -> None:
    """Collects a stream's text."""
    async for frame in proxy.frames(**body):
        assert "error" not in frame, frame
        text.append(frame["choices"][0]["text"])


def paused_script(proxy: Any, wait: Any) -> Any:
    return lambda _: [*proxy.ids(*TEXT[:2]), wait, *proxy.ids(*TEXT[2:]), [EOS]]


async def start_on_first(proxy: Any, wait: Any, until: Any) -> tuple[Any, Any, list[str], Any]:
    """Two nodes and a stream that has come half its way on one of them: (that node, the other, text, stream task)."""
    a = await proxy.node(paused_script(proxy, wait))
    text: list[str] = []
    task = asyncio.create_task(follow(proxy, text))
    await until(lambda: "".join(text) == "the quick ")
    b = await proxy.node(lambda _: [*proxy.ids(*TEXT), [EOS]])
    return a, b, text, task


async def test_a_node_dies_and_the_stream_goes_on(proxy: Any, wait: Any, until: Any) -> None:
    a, b, text, task = await start_on_first(proxy, wait, until)
    await a.die()
    await task
    assert "".join(text) == "the quick brown fox"
    decode = await b.expect(m.Decode)
    assert decode.leg == 2
    assert decode.choices[0].outputs == [i for ids in proxy.ids(*TEXT[:2]) for i in ids]
    metrics = await proxy.metrics()
    assert metrics['tandem:request_legs_total{cause="lost",model_name="tiny"}'] == 1


async def test_goodbye_moves_requests_at_once(proxy: Any, wait: Any, until: Any) -> None:
    a, b, text, task = await start_on_first(proxy, wait, until)
    await a.send(m.Goodbye(reason="scaled down"))
    await b.expect(m.Decode)
    await task
    assert "".join(text) == "the quick brown fox"


async def test_outputs_of_an_old_leg_are_dropped_and_aborted(proxy: Any, wait: Any, until: Any) -> None:
    a, b, text, task = await start_on_first(proxy, wait, until)
    decode = await a.expect(m.Decode)
    await a.output(decode, index=len(a.live[decode.request_id].choices[0].outputs), finish_reason="abort")
    await b.expect(m.Decode)
    await task
    await a.output(decode, index=2, token_ids=[5])
    abort = await a.expect(m.Abort)
    assert (abort.request_id, abort.leg) == (decode.request_id, 1)
    assert "".join(text) == "the quick brown fox"


async def test_the_last_node_dies(start_proxy: Any, wait: Any) -> None:
    """O-04: pending requests end with an error, /ready says 503."""
    proxy = await start_proxy(admission=AdmissionLimits(node_wait_seconds=0.2))
    node = await proxy.node(paused_script(proxy, wait))
    streamed = asyncio.create_task(proxy.stream())
    plain = asyncio.create_task(proxy.post("/v1/completions", {"prompt": "x"}))
    await node.expect(m.Decode, 2)
    async with proxy.http.get("/ready") as reply:
        assert reply.status == 200
    await node.die()
    status, body = await plain
    assert status == 503
    assert body["error"]["code"] == "service_unavailable"
    stream = await streamed
    assert stream.joined() == "the quick "
    assert stream.chunks[-1]["error"]["code"] == "service_unavailable"
    async with proxy.http.get("/ready") as reply:
        assert reply.status == 503
    async with proxy.http.get("/health") as reply:
        assert reply.status == 200


async def test_nodes_that_keep_dying_end_the_request(start_proxy: Any, wait: Any, until: Any) -> None:
    """A request that takes nodes down with it must not take them all."""
    proxy = await start_proxy(dispatch=DispatchLimits(max_lost_legs=2))
    nodes = [await proxy.node(lambda _: [wait]) for _ in range(3)]
    task = asyncio.create_task(proxy.post("/v1/completions", {"prompt": "x"}))
    for _ in range(2):
        await until(lambda: any(node.running for node in nodes))
        victim = next(node for node in nodes if node.running)
        victim.live.clear()
        await victim.send(m.Goodbye())
    status, body = await task
    assert status == 503
    assert "2 nodes failed" in body["error"]["message"]
    assert sum(node.count(m.Decode) for node in nodes) == 2


async def test_retryable_rejection_moves_on(proxy: Any) -> None:
    a = await proxy.node()
    a.rejection = ("full", "no room", True)
    task = asyncio.create_task(proxy.complete())
    await a.expect(m.Decode)
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert (await task)["choices"][0]["text"] == "Hello"


async def test_a_refused_request_tries_the_same_node_after_its_next_status(proxy: Any) -> None:
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    node.rejection = ("full", "no room", True)
    task = asyncio.create_task(proxy.complete())
    await node.expect(m.Decode)
    node.rejection = None
    assert (await task)["choices"][0]["text"] == "Hello"


async def test_final_rejection_is_the_clients(proxy: Any) -> None:
    node = await proxy.node()
    for code in ("context_length_exceeded", "invalid_value"):
        node.rejection = (code, "the numbers: 9 and 8", False)
        status, body = await proxy.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (400, code)
        assert body["error"]["message"] == "the numbers: 9 and 8"


async def test_an_error_of_the_node(proxy: Any) -> None:
    node = await proxy.node()
    task = asyncio.create_task(proxy.post("/v1/completions", {"prompt": "x"}))
    decode = await node.expect(m.Decode)
    await node.output(decode, index=0, finish_reason="error", error="out of memory")
    status, body = await task
    assert (status, body["error"]["code"]) == (500, "node_error")


async def test_a_node_that_does_not_answer(start_proxy: Any) -> None:
    proxy = await start_proxy(dispatch=DispatchLimits(accept_seconds=0.1))
    silent = await proxy.node()
    silent.is_accepting = False
    task = asyncio.create_task(proxy.complete())
    await silent.expect(m.Decode)
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert (await task)["choices"][0]["text"] == "Hello"
    await silent.expect(m.Abort)


async def test_the_deadline_of_a_request(start_proxy: Any, wait: Any) -> None:
    proxy = await start_proxy(dispatch=DispatchLimits(request_seconds=0.2))
    node = await proxy.node(lambda _: [wait])
    status, body = await proxy.post("/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["code"]) == (504, "timeout")
    await node.expect(m.Abort)


# --- lost messages --------------------------------------------------------------------------------------------------


async def test_lost_outputs_are_sent_again(proxy: Any, wait: Any, until: Any) -> None:
    """A gap in the sequence -> Rehello -> snapshot -> Resend; the client sees nothing of it."""
    node = await proxy.node(lambda _: [*proxy.ids("the "), wait, *proxy.ids("quick "), wait, *proxy.ids("fox"), [EOS]])
    text: list[str] = []
    task = asyncio.create_task(follow(proxy, text))
    await until(lambda: "".join(text) == "the ")
    node.drop_next()
    node.resume.set()
    await node.expect(m.Rehello)
    await node.expect(m.Resend)
    await until(lambda: "".join(text) == "the quick ")
    node.resume.set()
    await task
    assert "".join(text) == "the quick fox"
    assert node.count(m.Decode) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_any_losses_leave_every_stream_whole(proxy: Any, seed: int) -> None:
    """Two nodes lose a tenth of what they send, one of them dies on the way: every text is complete and in order."""
    words = [f"{i} " for i in range(30)]

    def script(decode: m.Decode) -> Any:
        return [*proxy.ids(*words), [EOS]]

    a, b = await proxy.node(script, max_num_seqs=20), await proxy.node(script, max_num_seqs=20)
    a.losses, b.losses = random.Random(seed), random.Random(seed + 100)
    texts: list[list[str]] = [[] for _ in range(12)]
    tasks = [asyncio.create_task(follow(proxy, text, max_tokens=500)) for text in texts]
    await a.expect(m.Decode, 3)
    if seed % 2:
        await a.die()
    await asyncio.gather(*tasks)
    assert ["".join(text) for text in texts] == ["".join(words)] * 12


async def test_what_a_node_does_not_list_moves(proxy: Any, wait: Any, until: Any) -> None:
    node = await proxy.node(paused_script(proxy, wait))
    text: list[str] = []
    task = asyncio.create_task(follow(proxy, text))
    await until(lambda: "".join(text) == "the quick ")
    node.knows_requests = False
    node.drop_next()
    again = await node.expect(m.Decode, 2)
    assert again.leg == 2
    assert len(again.choices[0].outputs) == len([i for ids in proxy.ids(*TEXT[:2]) for i in ids])
    node.resume.set()
    await task
    assert "".join(text) == "the quick brown fox"


async def test_what_the_proxy_does_not_know_is_aborted(proxy: Any) -> None:
    node = await proxy.node(live_requests=[m.LiveRequest("somebody/7", 3)])
    abort = await node.expect(m.Abort)
    assert (abort.request_id, abort.leg) == ("somebody/7", 3)


async def test_a_stranger_is_asked_for_hello(proxy: Any) -> None:
    node = await proxy.node(wait=False)
    node._spawn(node._receive())
    await node.send(m.Status(stats=m.NodeStats()), receiver="an-older-proxy")
    await node.expect(m.Rehello)
    await node.expect(m.Welcome)
    assert proxy.cluster.pool.is_ready


async def test_repeated_and_overlapping_outputs_are_accepted_once(proxy: Any) -> None:
    node = await proxy.node()
    task = asyncio.create_task(proxy.complete(logprobs=1))
    decode = await node.expect(m.Decode)
    ids = [i for [i] in proxy.bytes_ids(b"abcd")]

    def logprobs(start: int, end: int) -> list[m.TokenLogprobs]:
        return [m.TokenLogprobs(-float(i), [ids[i]], [-float(i)]) for i in range(start, end)]

    await node.output(decode, index=0, token_ids=ids[:2], logprobs=logprobs(0, 2))
    await node.output(decode, index=0, token_ids=ids[:2], logprobs=logprobs(0, 2))
    await node.output(decode, index=1, token_ids=ids[1:3], logprobs=logprobs(1, 3))
    await node.output(decode, index=3, token_ids=[ids[3], EOS], logprobs=logprobs(3, 4) * 2, finish_reason="stop")
    choice = (await task)["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["token_logprobs"] == [-0.0, -1.0, -2.0, -3.0]


async def test_nonsense_is_dropped_and_its_sender_is_cut_off(proxy: Any, until: Any) -> None:
    node = await proxy.node()
    await node.send_raw([b"\xc1", b"nonsense"])
    await until(lambda: proxy.cluster._link_of[node.instance_id].num_bad_messages == 1)
    assert proxy.cluster.pool.is_ready
    for _ in range(30):
        await node.send_raw([b"only one frame"])
    await until(lambda: not proxy.cluster.pool.is_ready)
    assert (await proxy.metrics())['tandem:control_messages_dropped_total{model_name="tiny"}'] > 20


async def test_who_comes_back_to_talk_nonsense_does_not_fill_the_log(
    proxy: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.asyncio.Context()
    for _ in range(5):
        socket = context.socket(zmq.DEALER)
        socket.connect(proxy.cluster.endpoint)
        await socket.send_multipart([b"only one frame"])
        await socket.send_multipart([b"only one frame"])
        socket.close(linger=5000)
    await until(lambda: sum(link.num_bad_messages for link in proxy.cluster._links.values()) == 10)
    context.term()
    assert caplog.text.count("control_message_dropped") == 1


# --- who fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol_version": 99}, ["99", str(m.PROTOCOL_VERSION)]),
        ({"model": "other"}, ["other", "tiny"]),
        ({"vocab_size": 500}, ["500", "512"]),
        ({"max_model_len": 4096}, ["4096", "2048"]),
    ],
)
async def test_a_node_that_does_not_fit_is_refused(proxy: Any, change: dict[str, Any], words: list[str]) -> None:
    await proxy.node()
    node = await proxy.node(wait=False, **change)
    node._spawn(node._receive())
    await node.send(node.hello)
    refused = await node.expect(m.Refused)
    assert all(word in refused.reason for word in words), refused.reason
    assert len(proxy.cluster.pool) == 1


async def test_a_draining_node_gets_no_new_work(proxy: Any, wait: Any, until: Any) -> None:
    a = await proxy.node(paused_script(proxy, wait))
    running = asyncio.create_task(proxy.complete())
    await a.expect(m.Decode)
    b = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    await a.send(m.Status(stats=a.stats, is_draining=True))
    await until(lambda: proxy.cluster.pool.get(a.instance_id).is_draining)
    a._beat = None
    for _ in range(3):
        assert (await proxy.complete())["choices"][0]["text"] == "Hello"
    assert (a.count(m.Decode), b.count(m.Decode)) == (1, 3)
    a.resume.set()
    assert (await running)["choices"][0]["text"] == "the quick brown fox"


async def test_prefill_nodes_are_named_as_sources(proxy: Any) -> None:
    decode_node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    busy = await proxy.node(role="prefill", stats=m.NodeStats(num_blocks=10, num_free_blocks=1))
    idle = await proxy.node(role="prefill")
    await proxy.complete(prompt=[5] * 40)
    await proxy.complete(prompt=[5] * 3)
    long, short = await decode_node.expect(m.Decode), await decode_node.expect(m.Decode, 2)
    assert [source.instance_id for source in long.sources] == [idle.instance_id, busy.instance_id]
    assert short.sources == []


# --- clients that leave ---------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_a_stream(proxy: Any, wait: Any, until: Any) -> None:
    node = await proxy.node(paused_script(proxy, wait))
    async for _ in proxy.frames():
        break
    abort = await node.expect(m.Abort)
    assert abort.request_id == (await node.expect(m.Decode)).request_id
    await until(lambda: proxy.cluster.num_requests == 0)
    metrics = await proxy.metrics()
    assert metrics['vllm:request_success_total{finished_reason="abort",model_name="tiny"}'] == 1


async def test_a_client_that_leaves_before_the_first_token(proxy: Any, wait: Any) -> None:
    node = await proxy.node(lambda _: [wait])
    task = asyncio.create_task(proxy.complete())
    await node.expect(m.Decode)
    task.cancel()
    await node.expect(m.Abort)


async def test_a_client_that_leaves_the_queue(start_proxy: Any, until: Any) -> None:
    proxy = await start_proxy()
    task = asyncio.create_task(proxy.complete())
    await until(lambda: proxy.cluster.admission.num_waiting == 1)
    task.cancel()
    await until(lambda: proxy.cluster.admission.num_waiting == 0)
    await until(lambda: proxy.cluster.num_requests == 0)


async def test_a_client_that_does_not_read(start_proxy: Any, until: Any) -> None:
    """Others are served meanwhile; after the deadline it counts as gone."""
    proxy = await start_proxy(stall_seconds=0.3)
    await proxy.node(lambda decode: [[5] * 10 for _ in range(200)] if len(decode.prompt_token_ids) > 1 else [[EOS]])
    port = int(proxy.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    body = b'{"model":"tiny","prompt":[%b],"stream":true,"max_tokens":2000,"logprobs":20}' % b",".join([b"[5,6]"] * 20)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: proxy.cluster.num_requests == 20)
    assert (await proxy.complete(prompt="x"))["choices"][0]["finish_reason"] == "stop"
    await until(lambda: proxy.cluster.num_requests == 0)
    writer.transport.abort()
    metrics = await proxy.metrics()
    assert metrics['vllm:request_success_total{finished_reason="abort",model_name="tiny"}'] > 0
