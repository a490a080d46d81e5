"""`python -m proxy`: reads the flags, loads the tokenizer, serves until a signal comes, and leaves cleanly.

SIGTERM or SIGINT: /ready says 503, no new connections and requests; running ones may finish within their grace, then
end with an error that says why, and nodes are told. A second signal ends the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from typing import Any

import uvloop
from aiohttp import web

from common.checkpoints.resolve import resolve_model
from common.checkpoints.sampling_defaults import SamplingDefaults
from common.config import parse
from common.config_variables import warn_of_unknown_variables
from common.descriptors import DescriptorWatch, raise_descriptor_limit
from common.errors import TandemError, UnavailableError
from common.logging import configure_logging, log_event, say_why_it_ends
from common.model_config import load_model_config
from common.node_http import listen_error
from common.plane_security import PlaneSecurity, load_cluster_security
from proxy.app import CLUSTER, LIFECYCLE, AppSettings, build_app
from proxy.config import ProxyConfig
from proxy.generation import SHUTTING_DOWN
from proxy.node_pool import NodePool
from proxy.serving_model import ModelLimits, ServingModel, load_serving_model

log = logging.getLogger("proxy")

HEARTBEAT_SECONDS = 0.25  # also how old the nodes' numbers in routing and /metrics may be
LEASE_SECONDS = 5.0
CLOSE_SECONDS = 0.5  # for a handler to write its last bytes, and again after it was cancelled
DRAIN_POLL_SECONDS = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 when it could not start or the control plane failed, 2 for a wrong flag."""
    config = parse(ProxyConfig, argv, prog="tandem proxy")
    configure_logging(config.log_level, "proxy", log_format=config.log_format)
    warn_of_unknown_variables()
    raise_descriptor_limit()
    try:
        security = load_cluster_security(config).control
        security.check(config.control_endpoint)
        uvloop.run(serve(config, security))
    except TandemError as error:
        say_why_it_ends("proxy", error.message, config.log_format)
        return 1
    return 0


async def serve(config: ProxyConfig, security: PlaneSecurity) -> None:
    """Serves until SIGTERM or SIGINT; raises TandemError when something it needs is not there."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    model, pool = _load_model(config)
    app = await build_app(model, pool, _settings(config, security))
    watch_task = asyncio.create_task(DescriptorWatch().run())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        await _listen(runner, config)
        await _wait_for_signal(app, stop)
        await _drain(runner, app, stop, config.shutdown_grace_seconds)
    finally:
        watch_task.cancel()
        await runner.cleanup()
    log_event(log, "stopped")


def _load_model(config: ProxyConfig) -> tuple[ServingModel, NodePool]:
    directory = resolve_model(config.model)
    model_config = load_model_config(directory)
    pool = NodePool(lease_seconds=LEASE_SECONDS, vocab_size=model_config.vocab_size)
    limits = ModelLimits(
        vocab_size=model_config.vocab_size,
        max_model_len=model_config.max_position_embeddings,
        eos_token_ids=model_config.eos_token_ids,
    )
    model = load_serving_model(
        directory,
        config.public_model_name,
        limits,
        lambda: pool.max_model_len,
        config.chat_template,
        uses_generation_config=config.generation_config == "auto",
    )
    _log_defaults(model.sampling_defaults)
    return model, pool


def _log_defaults(defaults: SamplingDefaults) -> None:
    fields: dict[str, Any] = {**defaults.values, "max_tokens": defaults.max_tokens}
    if defaults != SamplingDefaults():
        log_event(log, "sampling_defaults", **fields)


def _settings(config: ProxyConfig, security: PlaneSecurity) -> AppSettings:
    return AppSettings(
        control_endpoint=config.control_endpoint,
        control_security=security,
        api_key=config.api_key.get_secret_value() if config.api_key else None,
        admission=config.admission_limits,
        dispatch=config.dispatch_limits,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        lease_seconds=LEASE_SECONDS,
        stall_seconds=config.stall_seconds,
        max_body_bytes=config.max_body_bytes,
    )


async def _listen(runner: web.AppRunner, config: ProxyConfig) -> None:
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise listen_error(config.host, config.port, error) from None
    host, port = runner.addresses[0][:2]
    log_event(log, "http_listening", url=f"http://{host}:{port}", model=config.public_model_name)


async def _wait_for_signal(app: web.Application, stop: asyncio.Event) -> None:
    """Also ends when the control plane does, which is an error."""
    cluster_task = app[LIFECYCLE].cluster_task
    assert cluster_task is not None
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({stopped, cluster_task}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if cluster_task.done():
        cluster_task.result()


async def _drain(runner: web.AppRunner, app: web.Application, stop: asyncio.Event, grace_seconds: float) -> None:
    """Until every request has ended, the grace is over or another signal comes; what runs then is ended.

    aiohttp's own wait is no grace: it waits twice, and then cuts streams off without a word.
    """
    log_event(log, "stopping", grace_seconds=grace_seconds)
    cluster = app[CLUSTER]
    app[LIFECYCLE].is_stopping = cluster.is_closing = True
    stop.clear()
    for site in list(runner.sites):
        await site.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            while cluster.num_requests:
                with contextlib.suppress(TimeoutError):  # looks again now and then; a second signal ends the wait
                    await asyncio.wait_for(stop.wait(), DRAIN_POLL_SECONDS)
                    break
    cluster.end_all(UnavailableError(SHUTTING_DOWN))


if __name__ == "__main__":
    raise SystemExit(main())
