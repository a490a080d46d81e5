"""What both kinds of node process do around their own parts: start-up errors, logging, Hello, metrics of the node.

Knows flags and messages, no engine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from common import messages as m
from common.config import NodeFlags, parse
from common.config_variables import warn_of_unknown_variables
from common.control import ControlClient
from common.descriptors import raise_descriptor_limit
from common.errors import TandemError, UnavailableError
from common.kv_layout import KVLayout
from common.logging import configure_logging, say_why_it_ends
from common.metrics import Metrics, NodeSample, NodeStatsCollector
from common.node_http import Readiness
from common.plane_security import ClusterSecurity, load_cluster_security

log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=NodeFlags)


def run_node_process(config_class: type[_F], role: m.Role, run: Callable[[_F], Coroutine[Any, Any, None]]) -> None:
    """Parses the flags, runs the node, and ends with one clear line and status 1 when a user can mend the cause."""
    flags = parse(config_class, prog=f"tandem {role}")
    configure_logging(flags.log_level, role, log_format=flags.log_format)
    warn_of_unknown_variables()
    raise_descriptor_limit()
    try:
        uvloop.run(run(flags))
    except TandemError as error:
        say_why_it_ends(role, error.message, flags.log_format)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def load_node_security(flags: NodeFlags) -> ClusterSecurity:
    """Before anything slow, so that an address that is not allowed is refused at once. Raises ConfigError."""
    security = load_cluster_security(flags)
    for endpoint in flags.proxy:
        security.control.check(endpoint)
    return security


def make_failure(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Future[None], Callable[[BaseException], None]]:
    """A future for `serve_until_stopped`, and what a part of the node calls, from any thread, when it ended."""
    failure: asyncio.Future[None] = loop.create_future()

    def note(error: BaseException) -> None:
        if not failure.done():
            failure.set_exception(UnavailableError(f"the engine ended: {type(error).__name__}: {error}"))

    def report(error: BaseException) -> None:
        loop.call_soon_threadsafe(note, error)

    return failure, report


def make_readiness(control: ControlClient, failure: asyncio.Future[None]) -> Readiness:
    """Ready while a proxy is joined and nothing failed."""

    def readiness() -> str | None:
        if failure.done():
            return str(failure.exception())
        return None if control.num_joined else "; ".join(control.refusals) or "no proxy has been reached yet"

    return readiness


def make_hello(
    role: m.Role,
    flags: NodeFlags,
    layout: KVLayout,
    *,
    vocab_size: int,
    max_model_len: int,
    fetch_endpoints: list[str],
) -> Callable[[m.NodeStats, list[m.LiveRequest]], m.Hello]:
    """A function that fills in what changes from one Hello to the next."""

    def hello(stats: m.NodeStats, live_requests: list[m.LiveRequest]) -> m.Hello:
        return m.Hello(
            protocol_version=m.PROTOCOL_VERSION,
            role=role,
            model=flags.public_model_name,
            layout=layout,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=flags.max_num_seqs,
            fetch_endpoints=fetch_endpoints,
            stats=stats,
            live_requests=live_requests,
        )

    return hello


def node_metrics(
    role: m.Role, flags: NodeFlags, instance_id: str, layout: KVLayout, stats: Callable[[], m.NodeStats]
) -> Metrics:
    """The node's registry, with its load and counters read at each scrape."""
    metrics = Metrics(flags.public_model_name)
    sample = lambda: [NodeSample(instance_id, role, stats(), layout)]  # noqa: E731
    metrics.registry.register(NodeStatsCollector(flags.public_model_name, sample))
    return metrics
