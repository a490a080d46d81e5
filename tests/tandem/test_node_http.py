"""The HTTP server of a node."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import ConfigError
from common.node_http import NodeHttpServer

OLDER_PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


async def _ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as response:
        return response.status, await response.text()


@pytest.fixture
def start() -> Callable[..., NodeHttpServer]:
    def make(port: int = 0, **parts: object) -> NodeHttpServer:
        defaults = {"readiness": lambda: None, "registry": CollectorRegistry(), "reset_prefix_cache": lambda: None}
        return NodeHttpServer("127.0.0.1", port, **(defaults | parts))

    return make


async def test_health_ready_and_metrics(start: Callable[..., NodeHttpServer]) -> None:
    registry = CollectorRegistry()
    Counter("vllm:things", "Things.", registry=registry).inc(3)
    reasons: list[str | None] = ["no proxy has been reached yet"]
    async with start(readiness=lambda: reasons[0], registry=registry) as server:
        assert (await _ask(f"{server.url}/health"))[0] == 200
        status, text = await _ask(f"{server.url}/ready")
        assert status == 503
        assert "no proxy has been reached yet" in text
        reasons[0] = None
        assert (await _ask(f"{server.url}/ready"))[0] == 200
        for accepted in ("*/*", OLDER_PROMETHEUS):
            status, text = await _ask(f"{server.url}/metrics", Accept=accepted)
            assert status == 200
            assert "vllm:things_total 3.0" in text, accepted


async def test_reset_prefix_cache_is_a_post(start: Callable[..., NodeHttpServer]) -> None:
    resets: list[int] = []
    async with start(reset_prefix_cache=lambda: resets.append(1)) as server:
        assert (await _ask(f"{server.url}/reset_prefix_cache"))[0] == 405
        assert resets == []
        assert await _ask(f"{server.url}/reset_prefix_cache", "POST") == (200, '{"status": "ok"}')
        assert resets == [1]


async def test_a_port_in_use_is_named(start: Callable[..., NodeHttpServer]) -> None:
    async with start() as first:
        with pytest.raises(ConfigError, match=f"port {first.port} on 127.0.0.1 is in use"):
            await start(first.port).start()
