"""The control plane with a cluster secret: nodes that have it join, others are refused, and both sides say why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common import messages as m
from common.cluster_secret import ClusterSecret, new_secret_text
from common.control import ControlClient
from common.plane_security import HANDSHAKE_FAILURES, PlaneSecurity
from tests.proxy.scripted_node import make_hello
from tests.proxy.test_control_contract import EchoNode, ask

SECRET, OTHER = ClusterSecret(new_secret_text()), ClusterSecret(new_secret_text())
NONE = PlaneSecurity("control")
OURS = PlaneSecurity("control", SECRET.plane_keys("control"))
THEIRS = PlaneSecurity("control", OTHER.plane_keys("control"))
KNOWS_THE_SERVER_ONLY = PlaneSecurity(
    "control", type(OURS.keys)(SECRET.plane_keys("control").server, OTHER.plane_keys("control").client)
)


@asynccontextmanager
async def running(endpoint: str, instance_id: str, security: PlaneSecurity) -> AsyncIterator[ControlClient]:
    node = EchoNode()
    node.client = ControlClient(instance_id, [endpoint], node, security=security)
    task = asyncio.create_task(node.client.run())
    yield node.client
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("serving", "dialling", "node_says", "proxy_says"),
    [
        (OURS, THEIRS, "did not accept this process's cluster secret", "with another cluster secret was refused"),
        (OURS, KNOWS_THE_SERVER_ONLY, "did not accept", "with another cluster secret was refused"),
        # Of two that use different mechanisms each may be the first to hang up.
        (OURS, NONE, "a cluster secret", "secret"),
        (NONE, OURS, "has no", "secret"),
    ],
    ids=["another secret", "not on the list", "the node has none", "the proxy has none"],
)
async def test_who_has_not_the_secret_is_refused_and_others_go_on(
    start_proxy: Any,
    until: Any,
    caplog: pytest.LogCaptureFixture,
    serving: PlaneSecurity,
    dialling: PlaneSecurity,
    node_says: str,
    proxy_says: str,
) -> None:
    proxy = await start_proxy(control_security=serving)
    endpoint = proxy.cluster.endpoint

    def said(logger: str, words: str) -> bool:
        lines = [record.message for record in caplog.records if record.name == logger]
        return any(words in line and "--cluster-secret-file" in line and endpoint in line for line in lines)

    async with running(endpoint, "stranger", dialling) as stranger, running(endpoint, "friend", serving):
        await until(lambda: said("common.control", node_says))
        await until(lambda: said("proxy.control", proxy_says))
        assert any(node_says in reason for reason in stranger.refusals)  # what /ready of the node says
        await until(lambda: proxy.cluster.pool.is_ready)
        assert await ask(proxy, "all the same") == "all the same"
        assert not stranger.num_joined
        assert [node.instance_id for node in proxy.cluster.pool] == ["friend"]


@pytest.mark.parametrize("before", [THEIRS, KNOWS_THE_SERVER_ONLY, NONE], ids=["another", "not on the list", "none"])
async def test_a_node_that_was_refused_joins_once_it_fits(
    start_proxy: Any, until: Any, unused_tcp_port: int, before: PlaneSecurity
) -> None:
    """ZMQ alone would never dial again after most kinds of refusal."""
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    first = await start_proxy(control_endpoint=endpoint, control_security=OURS)
    async with running(endpoint, "node", before) as node:
        await until(lambda: node.refusals)
        await first.runner.cleanup()
        second = await start_proxy(control_endpoint=endpoint, control_security=before)
        await until(lambda: second.cluster.pool.is_ready and not node.refusals)
        assert await ask(second, "now") == "now"


@pytest.mark.parametrize("has_server_key", [False, True])
async def test_nothing_is_read_from_a_raw_peer(start_proxy: Any, has_server_key: bool) -> None:
    """A right Hello and a wrong one, over a bare ZMQ socket, plain or with keys that somebody made up."""
    proxy = await start_proxy(control_security=OURS)
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    monitor = peer.get_monitor_socket(HANDSHAKE_FAILURES)
    if has_server_key:
        peer.curve_serverkey = SECRET.plane_keys("control").server.public
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.connect(proxy.cluster.endpoint)
    await peer.send_multipart(m.encode(m.Envelope("raw", "", 1, 0), make_hello()))
    await peer.send_multipart([b"nonsense"])
    async with asyncio.timeout(10):
        await monitor.recv_multipart()
    peer.disable_monitor()
    context.destroy(linger=0)
    assert not list(proxy.cluster.pool)
    assert not [name for name in await proxy.metrics() if "messages_dropped" in name]


@pytest.mark.parametrize("security", [NONE, OURS], ids=["without a secret", "with one"])
async def test_who_dials_and_says_nothing_is_hung_up_on(
    start_proxy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: Any, security: Any
) -> None:
    """Else his connections cost file descriptors for half a minute each."""
    monkeypatch.setattr("common.plane_security.HANDSHAKE_SECONDS", 0.1)
    proxy = await start_proxy(control_security=security)
    host, port = proxy.cluster.endpoint.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(10):
        await reader.read()  # until it ends
    writer.close()
    await until(lambda: "fell silent during the handshake" in caplog.text)
