"""Starts a decode node: engine with head and sampler, fetch client, control connections, HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket

from common import messages as m
from common.checkpoints.resolve import resolve_model
from common.control import ControlClient
from common.engine.async_engine import AsyncEngine
from common.engine.build import EngineParts, build_engine
from common.engine.events import Event
from common.engine.step_observers import observed_steps
from common.grammar.compiler import GrammarCompiler
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
from decode_node.config import DecodeConfig
from decode_node.grammars import Grammars
from decode_node.legs import DecodeLimits
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from kvtransfer.client import FetchClient
from kvtransfer.metrics import TransferCollector
from kvtransfer.transports.registry import TransportSet

log = logging.getLogger(__name__)


def main() -> None:
    run_node_process(DecodeConfig, "decode", run)


async def run(flags: DecodeConfig) -> None:
    """Until a signal stops it. Raises TandemError when it cannot start."""
    instance_id = m.new_node_id(socket.gethostname())
    failure, report_failure = make_failure(asyncio.get_running_loop())
    security = load_node_security(flags)
    model_dir = resolve_model(flags.model)
    parts = await asyncio.to_thread(build_engine, model_dir, flags, with_head=True)
    config = parts.model_config
    grammars = Grammars(GrammarCompiler(model_dir, config.vocab_size, config.eos_token_ids).compile)
    client = FetchClient(
        parts.layout,
        parts.kv_cache.memory,
        instance_id,
        flags.lease_seconds,
        transports=TransportSet(security=security.fetch),
    )

    def on_events(events: list[Event]) -> None:
        node.post(node.engine_events, events)

    def send(proxy_id: str, message: m.NodeMessage) -> int | None:
        return control.send(proxy_id, message)

    engine = AsyncEngine(parts.engine, on_events, on_failure=report_failure, name="decode-engine")
    metrics = node_metrics("decode", flags, instance_id, parts.layout, engine.stats)
    metrics.registry.register(TransferCollector(client.stats, "client"))
    node = DecodeNode(
        engine=engine,
        open_fetch=client.open,
        send=send,
        hello=make_hello(
            "decode",
            flags,
            parts.layout,
            vocab_size=config.vocab_size,
            max_model_len=parts.max_model_len,
            fetch_endpoints=[],
        ),
        limits=_limits(flags, parts),
        block_size=parts.layout.block_size,
        hidden_size=config.hidden_size,
        metrics=DecodeMetrics(metrics),
        grammars=grammars,
        queue_seconds=flags.queue_seconds,
    )
    control = ControlClient(instance_id, flags.proxy, node, security=security.control)

    with observed_steps(parts.engine, flags, metrics, instance_id, "decode"):
        client.start()
        engine.start()
        try:
            log.info("decode node %s starts", instance_id)
            http = NodeHttpServer(
                flags.host,
                flags.port,
                readiness=make_readiness(control, failure),
                registry=metrics.registry,
                reset_prefix_cache=engine.reset_prefix_cache,
            )
            await serve_until_stopped(node, control, http=http, failure=failure, grace_seconds=flags.drain_seconds)
        finally:
            node.abort_all()
            grammars.close()
            await asyncio.to_thread(client.close)
            await asyncio.to_thread(engine.stop)
    log_event(log, "stopped")


def _limits(flags: DecodeConfig, parts: EngineParts) -> DecodeLimits:
    return DecodeLimits(
        max_model_len=parts.max_model_len,
        vocab_size=parts.model_config.vocab_size,
        eos_token_ids=parts.model_config.eos_token_ids,
        max_requests=flags.max_requests,
    )
