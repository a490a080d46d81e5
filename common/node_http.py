"""The small HTTP server that every node has, for probes, launchers, Prometheus and operators.

    /health                     200 while the process answers at all
    /ready                      200 when the node can take work, else 503 with the reason
    /metrics                    the registry in the Prometheus text format
    POST /reset_prefix_cache    empties the node's prefix cache; requests that come later find nothing from before

It knows no engine and no proxy: whoever starts it says what "ready" and "reset" mean.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Self

from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import ConfigError
from common.metrics import exposition

Readiness = Callable[[], str | None]
"""None when the node can take work, otherwise why not (one line)."""


def make_app(
    readiness: Readiness, registry: CollectorRegistry, reset_prefix_cache: Callable[[], None]
) -> web.Application:
    probes = _Probes(readiness, registry)

    async def reset(_: web.Request) -> web.Response:
        reset_prefix_cache()
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_get("/health", probes.health)
    app.router.add_get("/ready", probes.ready)
    app.router.add_get("/metrics", probes.metrics)
    app.router.add_post("/reset_prefix_cache", reset)
    return app


class NodeHttpServer:
    """Serves `make_app` from `start` to `stop`; also an async context manager. Port 0 takes any free port."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        readiness: Readiness,
        registry: CollectorRegistry,
        reset_prefix_cache: Callable[[], None],
    ) -> None:
        self._host = host
        self._requested_port = port
        app = make_app(readiness, registry, reset_prefix_cache)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    @property
    def port(self) -> int:
        """The port it listens on; only after `start`."""
        return int(self._runner.addresses[0][1])

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def start(self) -> Self:
        """Raises ConfigError naming address and port when it cannot listen there."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._requested_port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise listen_error(self._host, self._requested_port, error) from None
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def listen_error(host: str, port: int, error: OSError) -> ConfigError:
    """What to tell a person when a process cannot listen on host:port."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another process; choose another with --port")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}")


class _Probes:
    def __init__(self, readiness: Readiness, registry: CollectorRegistry) -> None:
        self._readiness = readiness
        self._registry = registry

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        if (reason := self._readiness()) is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def metrics(self, _: web.Request) -> web.Response:
        body, content_type = exposition(self._registry)
        return web.Response(body=body, headers={"Content-Type": content_type})
