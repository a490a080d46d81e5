"""Starts a prefill node: engine without a head, fetch server, control connections, HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket

from common import messages as m
from common.checkpoints.resolve import resolve_model
from common.control import ControlClient
from common.engine.async_engine import AsyncEngine
from common.engine.build import build_engine
from common.engine.events import Event
from common.engine.step_observers import observed_steps
from common.logging import log_event
from common.node_http import NodeHttpServer
from common.node_process import (
    load_node_security,
    make_failure,
    make_hello,
    make_readiness,
    node_metrics,
    run_node_process,
)
from common.node_service import serve_until_stopped
from kvtransfer.endpoints import tcp_endpoint
from kvtransfer.metrics import TransferCollector
from kvtransfer.own_address import host_for_peers
from kvtransfer.server import FetchServer
from kvtransfer.transports.registry import TransportSet
from prefill_node.config import PrefillConfig
from prefill_node.engine_store import EngineStore
from prefill_node.node import PrefillNode

log = logging.getLogger(__name__)


def main() -> None:
    run_node_process(PrefillConfig, "prefill", run)


async def run(flags: PrefillConfig) -> None:
    """Until a signal stops it. Raises TandemError when it cannot start."""
    instance_id = m.new_node_id(socket.gethostname())
    failure, report_failure = make_failure(asyncio.get_running_loop())
    security = load_node_security(flags)
    fetch_endpoint = tcp_endpoint(flags.fetch_host, flags.fetch_port)
    security.fetch.check(fetch_endpoint)
    advertise_host = await asyncio.to_thread(host_for_peers, flags.fetch_host, flags.advertise_host, flags.proxy)
    parts = await asyncio.to_thread(build_engine, resolve_model(flags.model), flags, with_head=False)

    def on_events(events: list[Event]) -> None:
        store.engine_events(events)

    engine = AsyncEngine(parts.engine, on_events, on_failure=report_failure, name="prefill-engine")
    store = EngineStore(engine, parts.layout, parts.kv_cache.readonly_memory, parts.model_config.vocab_size)
    server = FetchServer(
        store,
        instance_id,
        [fetch_endpoint, "ipc://*"],
        flags.lease_seconds,
        hold_seconds=flags.hold_seconds,
        advertise_host=advertise_host,
        transports=TransportSet(security=security.fetch),
    )
    metrics = node_metrics("prefill", flags, instance_id, parts.layout, engine.stats)
    metrics.registry.register(TransferCollector(server.stats, "server"))
    with observed_steps(parts.engine, flags, metrics, instance_id, "prefill"):
        endpoints = server.start()
        if flags.fetch_advertise is not None:
            endpoints = [flags.fetch_advertise]
        engine.start()
        try:
            log.info("prefill node %s serves fetches at %s", instance_id, ", ".join(endpoints))
            hello = make_hello(
                "prefill",
                flags,
                parts.layout,
                vocab_size=parts.model_config.vocab_size,
                max_model_len=parts.max_model_len,
                fetch_endpoints=endpoints,
            )
            node = PrefillNode(store, stats=engine.stats, hello=hello, reset_prefix_cache=engine.reset_prefix_cache)
            control = ControlClient(instance_id, flags.proxy, node, security=security.control)
            http = NodeHttpServer(
                flags.host,
                flags.port,
                readiness=make_readiness(control, failure),
                registry=metrics.registry,
                reset_prefix_cache=engine.reset_prefix_cache,
            )
            await serve_until_stopped(node, control, http=http, failure=failure, grace_seconds=flags.drain_seconds)
        finally:
            await asyncio.to_thread(server.close)
            await asyncio.to_thread(engine.stop)
    log_event(log, "stopped")
