"""A node whose engine ended by itself says Goodbye and ends with the cause; one that is asked to stop drains first."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from common import messages as m
from common.control import ControlClient
from common.errors import UnavailableError
from common.kv_layout import KVLayout
from common.node_http import NodeHttpServer
from common.node_process import make_failure, make_readiness
from common.node_service import serve_until_stopped

LAYOUT = KVLayout(2, 1, 4, 16, "float32", "tiny")


class Handler:
    def __init__(self) -> None:
        self.num_live_requests = 0
        self.is_draining = False

    def hello(self, proxy_id: str) -> m.Hello:
        return m.Hello(
            protocol_version=1,
            role="decode",
            model="tiny",
            layout=LAYOUT,
            max_model_len=100,
            vocab_size=50,
            max_num_seqs=8,
            fetch_endpoints=[],
            stats=m.NodeStats(),
        )

    def status(self) -> m.Status:
        return m.Status(stats=m.NodeStats(), is_draining=self.is_draining)

    def received(self, proxy_id: str, message: m.ProxyMessage) -> None: ...
    def acknowledged(self, proxy_id: str, sequence: int) -> None: ...
    def proxy_lost(self, proxy_id: str) -> None: ...

    def drain(self) -> None:
        self.is_draining = True


class Proxy:
    """Welcomes one node and keeps what it says."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.heard: list[m.NodeMessage] = []

    async def run(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            envelope, message = m.decode_from_node(frames)
            self.heard.append(message)
            if isinstance(message, m.Hello):
                welcome = m.Welcome(heartbeat_seconds=0.05, lease_seconds=5.0)
                header = m.Envelope("proxy", envelope.sender, 1, envelope.sequence)
                await self._socket.send_multipart([identity, *m.encode(header, welcome)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def scene() -> Any:
    proxy, handler = Proxy(), Handler()
    control = ControlClient("node", [proxy.endpoint], handler)
    failure, report = make_failure(asyncio.get_running_loop())
    http = NodeHttpServer(
        "127.0.0.1",
        0,
        readiness=make_readiness(control, failure),
        registry=CollectorRegistry(),
        reset_prefix_cache=lambda: None,
    )
    listening = asyncio.create_task(proxy.run())
    serving = asyncio.create_task(serve_until_stopped(handler, control, http=http, failure=failure, grace_seconds=5.0))
    yield proxy, handler, serving, report
    for task in (serving, listening):
        task.cancel()
    await asyncio.gather(serving, listening, return_exceptions=True)
    proxy.close()


async def test_engine_that_ended_ends_the_node_with_the_cause(scene: Any, wait_for: Callable[..., Any]) -> None:
    proxy, handler, serving, report = scene
    handler.num_live_requests = 3
    await wait_for(lambda: any(isinstance(message, m.Status) for message in proxy.heard))
    await asyncio.to_thread(report, ZeroDivisionError("books"))
    with pytest.raises(UnavailableError, match="the engine ended: ZeroDivisionError: books"):
        await asyncio.wait_for(serving, 5)
    await wait_for(lambda: proxy.heard[-1] == m.Goodbye(reason="failed"))


async def test_it_outlives_that_its_file_descriptors_run_out_and_says_so(
    scene: Any, wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    proxy, _, serving, _ = scene
    await wait_for(lambda: any(isinstance(message, m.Status) for message in proxy.heard))
    with no_descriptors_left():
        await wait_for(lambda: "nearly all of the" in caplog.text)
    num_heard = len(proxy.heard)
    await wait_for(lambda: len(proxy.heard) > num_heard)
    assert not serving.done()


async def test_a_proxy_that_cannot_be_dialled_for_lack_of_file_descriptors_is_dialled_later(
    wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy()
    control = ControlClient("node", [proxy.endpoint], Handler())
    control._context.socket(zmq.DEALER).close()  # has its threads started
    listening = asyncio.create_task(proxy.run())
    with no_descriptors_left():
        running = asyncio.create_task(control.run())
        await wait_for(lambda: "Too many open files" in caplog.text)
        assert control.refusals == [f"cannot dial the proxy at {proxy.endpoint}: Too many open files"]
    await wait_for(lambda: control.num_joined)
    for task in (running, listening):
        task.cancel()
    await asyncio.gather(running, listening, return_exceptions=True)
    proxy.close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_signal_drains_before_goodbye(scene: Any, wait_for: Callable[..., Any]) -> None:
    proxy, handler, serving, _ = scene
    handler.num_live_requests = 1
    await wait_for(lambda: any(isinstance(message, m.Status) for message in proxy.heard))
    os.kill(os.getpid(), signal.SIGTERM)
    await wait_for(lambda: any(isinstance(x, m.Status) and x.is_draining for x in proxy.heard))
    assert not serving.done()
    handler.num_live_requests = 0
    await asyncio.wait_for(serving, 5)
    await wait_for(lambda: proxy.heard[-1] == m.Goodbye(reason="stopped"))
