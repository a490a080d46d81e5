"""The HTTP server of a node."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import ConfigError
from common.node_http import NodeHttpServer


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_health_ready_and_metrics() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    reasons: list[str | None] = ["no proxy has been reached yet"]
    async with NodeHttpServer("127.0.0.1", 0, readiness=lambda: reasons[0], registry=registry) as server:
        assert (await _get(f"{server.url}/health"))[0] == 200
        status, text = await _get(f"{server.url}/ready")
        assert status == 503
        assert "no proxy has been reached yet" in text
        reasons[0] = None
        assert (await _get(f"{server.url}/ready"))[0] == 200
        status, text = await _get(f"{server.url}/metrics")
        assert status == 200
        assert "things_total 3.0" in text


async def test_a_port_in_use_is_named() -> None:
    registry = CollectorRegistry()
    async with NodeHttpServer("127.0.0.1", 0, readiness=lambda: None, registry=registry) as first:
        second = NodeHttpServer("127.0.0.1", first.port, readiness=lambda: None, registry=registry)
        with pytest.raises(ConfigError, match=f"port {first.port} on 127.0.0.1 is in use"):
            await second.start()
