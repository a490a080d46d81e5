"""The proxy and a node's own end of the control plane (`common.control`), both real, over a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common import messages as m
from common.control import ControlClient
from common.kv_layout import KVLayout

EOS = 2
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="tiny")


class EchoNode:
    """Answers every Decode with its own prompt, token by token, and remembers what it was told."""

    def __init__(self) -> None:
        self.client: ControlClient | None = None
        self.lost: list[str] = []
        self.aborted: list[str] = []

    def hello(self, proxy_id: str) -> m.Hello:
        return m.Hello(
            protocol_version=m.PROTOCOL_VERSION,
            role="decode",
            model="tiny",
            layout=LAYOUT,
            max_model_len=2048,
            vocab_size=512,
            max_num_seqs=8,
            fetch_endpoints=["tcp://127.0.0.1:1"],
            stats=m.NodeStats(num_blocks=10, num_free_blocks=10),
        )

    def status(self) -> m.Status:
        return m.Status(stats=m.NodeStats(num_blocks=10, num_free_blocks=10))

    def received(self, proxy_id: str, message: m.ProxyMessage) -> None:
        assert self.client is not None
        if isinstance(message, m.Abort):
            self.aborted.append(message.request_id)
        if not isinstance(message, m.Decode):
            return
        self.client.send(proxy_id, m.Accepted(request_id=message.request_id, leg=message.leg))
        [choice] = message.choices
        tokens = [*message.prompt_token_ids, EOS][len(choice.outputs) :]
        for index, token_id in enumerate(tokens, len(choice.outputs)):
            finish: Any = "stop" if token_id == EOS else None
            output = m.RequestOutput(
                request_id=message.request_id, leg=message.leg, index=index, token_ids=[token_id], finish_reason=finish
            )
            self.client.send(proxy_id, m.Outputs(outputs=[output]))

    def acknowledged(self, proxy_id: str, sequence: int) -> None: ...

    def proxy_lost(self, proxy_id: str) -> None:
        self.lost.append(proxy_id)


@asynccontextmanager
async def running(endpoint: str, instance_id: str = "echo") -> AsyncIterator[EchoNode]:
    node = EchoNode()
    node.client = ControlClient(instance_id, [endpoint], node)
    task = asyncio.create_task(node.client.run())
    yield node
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ask(proxy: Any, text: str) -> str:
    reply = await proxy.complete(prompt=text)
    return str(reply["choices"][0]["text"])


async def test_a_node_joins_and_answers(proxy: Any, until: Any) -> None:
    async with running(proxy.cluster.endpoint):
        await until(lambda: proxy.cluster.pool.is_ready)
        replies = await asyncio.gather(*(ask(proxy, f"text {i}") for i in range(30)))
        assert replies == [f"text {i}" for i in range(30)]
        assert proxy.cluster.pool.get("echo").num_own_sequences == 0
        await asyncio.sleep(0.6)  # beyond the lease: heartbeats keep it
        assert proxy.cluster.pool.is_ready


async def test_a_node_that_dials_before_the_proxy_is_there(start_proxy: Any, unused_tcp_port: int, until: Any) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    async with running(endpoint):
        proxy = await start_proxy(control_endpoint=endpoint)
        await until(lambda: proxy.cluster.pool.is_ready)
        assert await ask(proxy, "late") == "late"


async def test_a_restarted_proxy_is_another_one(start_proxy: Any, unused_tcp_port: int, until: Any) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    first = await start_proxy(control_endpoint=endpoint)
    async with running(endpoint) as node:
        await until(lambda: first.cluster.pool.is_ready)
        old_id = first.cluster.instance_id
        await first.runner.cleanup()
        second = await start_proxy(control_endpoint=endpoint)
        await until(lambda: second.cluster.pool.is_ready)
        assert node.lost == [old_id]
        assert await ask(second, "again") == "again"


@pytest.mark.parametrize(("reason", "level"), [("stopped", logging.INFO), ("failed", logging.WARNING)])
async def test_a_node_that_was_stopped_is_no_reason_to_worry(
    proxy: Any, until: Any, caplog: pytest.LogCaptureFixture, reason: str, level: int
) -> None:
    with caplog.at_level(logging.INFO):
        async with running(proxy.cluster.endpoint) as node:
            assert node.client is not None
            await until(lambda: node.client.num_joined)
            node.client.broadcast(m.Goodbye(reason=reason))
        await until(lambda: not proxy.cluster.pool.get("echo"))
    [record] = [record for record in caplog.records if "node_lost" in record.getMessage()]
    assert f"it left: {reason}" in record.getMessage()
    assert record.levelno == level


async def test_a_restarted_node_is_another_one(proxy: Any, until: Any) -> None:
    async with running(proxy.cluster.endpoint, "first"):
        await until(lambda: proxy.cluster.pool.is_ready)
    async with running(proxy.cluster.endpoint, "second"):
        await until(lambda: proxy.cluster.pool.get("second"))
        await until(lambda: not proxy.cluster.pool.get("first"))  # silent past its lease
        assert await ask(proxy, "next") == "next"
