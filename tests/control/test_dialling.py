"""A node dials a proxy anew that went without a word: behind a relay whose connections stay open and let nothing by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common import control
from common import messages as m
from common.clock import ManualClock
from common.control import FIRST_LEASE_SECONDS, ControlClient
from tests.nodes.test_node_service import Handler as PlainHandler

LEASE_SECONDS = 2.0


class Handler(PlainHandler):
    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []

    def proxy_lost(self, proxy_id: str) -> None:
        self.lost.append(proxy_id)


class Proxy:
    """Welcomes whoever says Hello, and says nothing else."""

    def __init__(self, proxy_id: str, context: zmq.asyncio.Context) -> None:
        self._id = proxy_id
        self._socket = context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    async def run(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            envelope, message = m.decode_from_node(frames)
            if isinstance(message, m.Hello):
                welcome = m.Welcome(heartbeat_seconds=0.02, lease_seconds=LEASE_SECONDS)
                header = m.Envelope(self._id, envelope.sender, 1, envelope.sequence)
                await self._socket.send_multipart([identity, *m.encode(header, welcome)])


class Relay:
    """The one address at which the node looks for a proxy. target: port of who is there; None: nobody, in silence."""

    def __init__(self) -> None:
        self.target: int | None = None
        self.num_accepted = 0
        self._passes: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def vanish(self, successor: int | None) -> None:
        """Who is there goes without a FIN; its connections stay open and dead."""
        for task in self._passes:
            task.cancel()
        self.target = successor

    async def stop(self) -> None:
        self._server.close()
        self.vanish(None)
        await asyncio.gather(*self._passes, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self._writers.append(writer)
        if self.target is not None:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.append(there_writer)
            for source, sink in ((reader, there_writer), (there_reader, writer)):
                self._passes.add(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)


class Scene:
    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.first, self.second = Proxy("first", self.context), Proxy("second", self.context)
        self.relay = Relay()
        self.clock = ManualClock()
        self.handler = Handler()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, target: int | None) -> ControlClient:
        self.relay.target = target
        await self.relay.start()
        node = ControlClient("node", [self.relay.endpoint], self.handler, self.clock)
        self._tasks = [asyncio.create_task(work.run()) for work in (self.first, self.second, node)]
        return node

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.relay.stop()
        self.context.destroy(linger=0)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def is_joined(node: ControlClient, proxy_id: str) -> bool:
    return node.send(proxy_id, m.Status(stats=m.NodeStats())) is not None


async def test_a_proxy_that_vanished_is_dialled_anew_and_its_successor_joined(scene: Scene) -> None:
    node = await scene.start(scene.first.port)
    await until(lambda: is_joined(node, "first"))
    scene.relay.vanish(successor=scene.second.port)
    scene.clock.advance(LEASE_SECONDS + 0.1)
    await until(lambda: is_joined(node, "second"))
    assert scene.handler.lost == ["first"]
    assert node.refusals == []
    assert scene.relay.num_accepted == 2


async def test_until_then_the_node_says_whom_it_lost_and_goes_on_dialling(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", 1000.0)  # silence alone is what counts here
    node = await scene.start(scene.first.port)
    await until(lambda: is_joined(node, "first"))
    assert node.refusals == []
    scene.relay.vanish(successor=None)
    scene.clock.advance(LEASE_SECONDS + 0.1)
    await until(lambda: scene.relay.num_accepted == 2)
    scene.clock.advance(FIRST_LEASE_SECONDS - 1)
    lost = f"lost proxy first at {scene.relay.endpoint}"
    assert node.refusals == [f"{lost}, 4 s ago; dialling it again"]
    assert [record.message for record in caplog.records if "lost" in record.message] == [f"{lost}; dialling it again"]
    scene.relay.target = scene.second.port  # for connections to come: the node's second one stays as dead as the first
    scene.clock.advance(1.1)
    await until(lambda: is_joined(node, "second"))
    assert node.refusals == []
    assert scene.handler.lost == ["first"]


async def test_one_that_takes_connections_and_says_nothing_is_named_and_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(control, "REDIAL_SECONDS", 0.01)
    node = await scene.start(target=None)
    await until(lambda: node.refusals)
    assert node.refusals == [
        f"the proxy at {scene.relay.endpoint} took the connection and said nothing for 0.2 s: it hangs, or is no proxy"
    ]
    scene.relay.target = scene.first.port
    await until(lambda: is_joined(node, "first"))
    assert node.refusals == []
