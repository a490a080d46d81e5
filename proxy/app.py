"""Puts the proxy together: pool, admission, cluster, model, endpoints, in one aiohttp application.

Imports no torch and no transformers, directly or not; a test holds it to that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

from common.logging import log_event
from common.metrics import Metrics, NodeStatsCollector
from common.plane_security import LOCAL_CONTROL, PlaneSecurity
from proxy import middleware
from proxy.admission import Admission, AdmissionLimits
from proxy.cluster import Cluster
from proxy.dispatcher import DispatchLimits
from proxy.generation import Generator
from proxy.node_pool import NodePool
from proxy.request_metrics import RequestMetrics
from proxy.routes import Routes
from proxy.serving_model import ServingModel
from proxy.traffic_log import Load, TrafficLog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppSettings:
    """What the application needs to know beside the model; `ProxyConfig` makes one from flags."""

    control_endpoint: str
    control_security: PlaneSecurity = LOCAL_CONTROL
    api_key: str | None = None
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    dispatch: DispatchLimits = field(default_factory=DispatchLimits)
    heartbeat_seconds: float = 1.0
    lease_seconds: float = 5.0
    stall_seconds: float = 120.0
    max_body_bytes: int = 16 << 20


@dataclass
class Lifecycle:
    """cluster_task: serves the control connections; it ends only with the process. is_stopping: a signal came."""

    cluster_task: asyncio.Task[None] | None = None
    is_stopping: bool = False


CLUSTER = web.AppKey("cluster", Cluster)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)


async def build_app(model: ServingModel, pool: NodePool, settings: AppSettings) -> web.Application:
    """The application, its control socket bound already; raises ConfigError when it cannot be."""
    metrics = Metrics(model.name)
    admission = Admission(pool, settings.admission)
    cluster = Cluster(
        endpoint=settings.control_endpoint,
        security=settings.control_security,
        pool=pool,
        admission=admission,
        metrics=metrics,
        heartbeat_seconds=settings.heartbeat_seconds,
        lease_seconds=settings.lease_seconds,
    )
    collector = NodeStatsCollector(model.name, cluster.node_samples, lambda: admission.num_waiting)
    metrics.registry.register(collector)
    lifecycle = Lifecycle()
    request_metrics = RequestMetrics(metrics)
    routes = Routes(
        model=model,
        cluster=cluster,
        generator=Generator(model, cluster, request_metrics, settings.dispatch),
        registry=metrics.registry,
        is_stopping=lambda: lifecycle.is_stopping,
        started=int(time.time()),
        stall_seconds=settings.stall_seconds,
    )
    app = web.Application(middlewares=_middlewares(settings), client_max_size=settings.max_body_bytes)
    app[CLUSTER] = cluster
    app[LIFECYCLE] = lifecycle
    app.add_routes(routes.table())
    app.on_response_prepare.append(middleware.add_request_id)
    app.cleanup_ctx.append(_run_cluster)
    app.cleanup_ctx.append(
        _run_traffic_log(
            TrafficLog(request_metrics.totals, lambda: Load(cluster.num_requests, admission.num_waiting, len(pool)))
        )
    )
    app.cleanup_ctx.append(_own_model(model))
    return app


def _middlewares(settings: AppSettings) -> list[Middleware]:
    """Outermost first: ids are there for every error, keys are checked before anything is read."""
    chain: list[Middleware] = [middleware.request_ids, middleware.openai_errors]
    if settings.api_key is not None:
        chain.append(middleware.require_api_key(settings.api_key))
    return [*chain, middleware.limit_body(settings.max_body_bytes)]


async def _run_cluster(app: web.Application) -> AsyncIterator[None]:
    cluster, lifecycle = app[CLUSTER], app[LIFECYCLE]
    task = lifecycle.cluster_task = asyncio.create_task(cluster.run(), name="cluster")
    log_event(log, "control_listening", endpoint=cluster.endpoint, instance=cluster.instance_id)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _run_traffic_log(traffic: TrafficLog) -> Callable[[web.Application], AsyncIterator[None]]:
    async def run(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(traffic.run(), name="traffic log")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return run


def _own_model(model: ServingModel) -> Callable[[web.Application], AsyncIterator[None]]:
    async def own(_: web.Application) -> AsyncIterator[None]:
        yield
        model.close()

    return own
