"""The life of a node process around its parts: control connections, HTTP, signals, drain.

    start HTTP -> dial the proxies -> serve until SIGTERM/SIGINT -> leave routing, finish what runs -> Goodbye -> exit 0

It knows no engine and no role; a node gives it a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import Any, Protocol

from common import messages as m
from common.control import ControlClient, ControlHandler
from common.descriptors import DescriptorWatch
from common.node_http import NodeHttpServer

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05


class NodeHandler(ControlHandler, Protocol):
    """A node as its service sees it."""

    def drain(self) -> None:
        """Take no new work."""
        ...

    @property
    def num_live_requests(self) -> int:
        """What a drain waits for."""
        ...


async def serve_until_stopped(
    handler: NodeHandler,
    control: ControlClient,
    *,
    http: NodeHttpServer,
    failure: asyncio.Future[None],
    grace_seconds: float,
) -> None:
    """Runs the node until a signal comes; a second signal ends the drain at once.

    failure: gets an exception when a part of the node ended by itself. Then the node says Goodbye, so that its requests
    move at once, and the exception is raised: a node that cannot compute must not look alive.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    await http.start()
    log.info("node HTTP at %s", http.url)
    control_task = asyncio.create_task(control.run())
    watch_task = asyncio.create_task(DescriptorWatch().run())
    stopped = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [control_task, stopped, failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if control_task.done():
            control_task.result()  # raises what ended it
        if not failure.done():
            stop.clear()
            await _drain(handler, control, stop, grace_seconds)
        control.broadcast(m.Goodbye(reason="failed" if failure.done() else "stopped"))
        if failure.done():
            failure.result()
    finally:
        for task in (stopped, control_task, watch_task):
            task.cancel()
        await asyncio.gather(stopped, control_task, watch_task, return_exceptions=True)
        await http.stop()


async def _drain(handler: NodeHandler, control: ControlClient, stop: asyncio.Event, grace_seconds: float) -> None:
    handler.drain()
    control.broadcast(handler.status())
    if handler.num_live_requests:
        log.info("draining: %d requests still run, at most %.0f s", handler.num_live_requests, grace_seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            while handler.num_live_requests:
                with contextlib.suppress(TimeoutError):  # looks again now and then; a second signal ends the wait
                    await asyncio.wait_for(stop.wait(), DRAIN_POLL_SECONDS)
                    return
