"""`tandem status`: the pools and nodes of a proxy as a table, once or live. Reads GET /nodes; knows no flags of theirs.

A share or rate that nothing has counted for yet shows as a dash.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.argument_parser import Parser
from common.errors import PeerError, TandemError
from tandem.endpoint import Endpoint, add_endpoint_flags

_ROLES = ("prefill", "decode")
_STYLES = {"joined": "green", "paused": "yellow", "draining": "yellow"}
_PLAIN_WIDTH = 120  # of what is no terminal


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    console = _Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        endpoint = Endpoint(arguments.url, arguments.api_key)
        asyncio.run(_watch(endpoint, console, arguments.interval) if arguments.watch else _show(endpoint, console))
    except TandemError as error:
        print(f"tandem status: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


class _Console(Console):
    """Leaves a closed pipe (`tandem status --watch | head`) to the command line, which ends well then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


async def _show(endpoint: Endpoint, console: Console) -> None:
    async with endpoint:
        console.print(render(endpoint.url, await read(endpoint)))


async def _watch(endpoint: Endpoint, console: Console, interval_seconds: float) -> None:
    """Until Ctrl-C; a proxy that goes away may come back. Raises TandemError if it is not there to begin with."""
    async with endpoint:
        shown = render(endpoint.url, await read(endpoint))
        if not console.is_terminal:
            while True:
                console.print(shown)
                await asyncio.sleep(interval_seconds)
                shown = await _read_again(endpoint)
        with Live(shown, console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_seconds)
                live.update(await _read_again(endpoint), refresh=True)


async def _read_again(endpoint: Endpoint) -> RenderableType:
    try:
        return render(endpoint.url, await read(endpoint))
    except TandemError as error:
        return Text(error.message, style="red")


async def read(endpoint: Endpoint) -> dict[str, Any]:
    """What the proxy says. Raises PeerError when it is another kind of server."""
    body = await endpoint.get("/nodes")
    if not isinstance(body, dict) or not isinstance(body.get("nodes"), list):
        raise PeerError(f"{endpoint.url}/nodes names no nodes: is it a Tandem proxy?")
    return body


def render(url: str, cluster: dict[str, Any]) -> RenderableType:
    nodes = sorted(cluster["nodes"], key=lambda node: (_ROLES.index(node["role"]), node["node"]))
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("pool", "node", "health"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in ("running", "waiting", "KV use", "preempted", "cache hits"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in _ROLES:
        pool = [node for node in nodes if node["role"] == role]
        for node in pool:
            table.add_row(role, node["node"], Text(node["health"], style=_STYLES.get(node["health"], "")), *_row(node))
        if len(pool) > 1:
            table.add_row(role, f"all {len(pool)}", "", *_row(_sum(pool)), style="dim")
    queued = cluster["num_queued"]
    head = f"{cluster['model']} at {url}: " + ("ready" if cluster["is_ready"] else "not ready")
    return Group(Text(f"{head}, {queued} waiting at the proxy"), table if nodes else Text("no node has joined"))


def _row(node: dict[str, Any]) -> list[str]:
    stats = node["stats"]
    waiting = stats["num_waiting"] + stats["num_waiting_for_kv"] + stats["num_swapped"]
    return [
        f"{stats['num_running']}/{node['max_num_seqs']}",
        str(waiting),
        _percent(stats["num_blocks"] - stats["num_free_blocks"], stats["num_blocks"]),
        str(stats["num_preemptions"]),
        _percent(stats["prefix_cache_hits"], stats["prefix_cache_queries"]),
    ]


def _sum(pool: list[dict[str, Any]]) -> dict[str, Any]:
    stats = {name: sum(node["stats"][name] for node in pool) for name in pool[0]["stats"]}
    return {"stats": stats, "max_num_seqs": sum(node["max_num_seqs"] for node in pool)}


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number of seconds from 0.1 to 3600")
    return seconds


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem status",
        usage="%(prog)s [FLAGS]",
        description="The pools and nodes that are joined to a proxy: requests that run (of how many can) and wait, use "
        "of the KV blocks, preemptions, hits in the prefix cache, both since the node's start.",
    )
    add_endpoint_flags(parser)
    parser.add_argument("--watch", action="store_true", help="go on showing it, until Ctrl-C")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="how often with --watch (default: 1)"
    )
    return parser
