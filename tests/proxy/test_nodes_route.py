"""GET /nodes, and `tandem status`, which reads it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common import messages as m
from tandem.cli import main
from tests.proxy.scripted_node import ScriptedNode

QUIET = m.NodeStats(num_blocks=100, num_free_blocks=100)
BUSY = m.NodeStats(
    num_running=3,
    num_waiting=1,
    num_waiting_for_kv=2,
    num_swapped=1,
    num_blocks=100,
    num_free_blocks=25,
    num_preemptions=7,
    prefix_cache_queries=200,
    prefix_cache_hits=50,
)


async def _status(proxy: Any, capsys: Any, *flags: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(main, ["status", "--url", proxy.url, *flags])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@asynccontextmanager
async def _draining(node: ScriptedNode) -> AsyncIterator[None]:
    """Its heartbeats say that it leaves."""

    async def beat() -> None:
        while True:
            await node.send(m.Status(stats=QUIET, is_draining=True))
            await asyncio.sleep(0.05)

    node.is_silent = True  # its own ones
    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()


async def test_nodes_lists_what_each_node_said_last(proxy: Any) -> None:
    async with proxy.http.get("/nodes") as reply:
        assert await reply.json() == {"model": "tiny", "is_ready": False, "num_queued": 0, "nodes": []}
    await proxy.node(stats=BUSY)
    async with proxy.http.get("/nodes") as reply:
        body = await reply.json()
    [entry] = body["nodes"]
    assert body["is_ready"]
    assert (entry["node"], entry["role"], entry["health"]) == ("decode-0", "decode", "joined")
    assert entry["stats"]["num_running"] == 3
    assert entry["max_num_seqs"] == proxy.cluster.pool.get("decode-0").hello.max_num_seqs


async def test_nodes_asks_for_the_key(start_proxy: Any) -> None:
    proxy = await start_proxy(api_key="k")
    async with proxy.http.get("/nodes") as reply:
        assert reply.status == 401


async def test_status_shows_pools_and_nodes(proxy: Any, until: Any, capsys: Any) -> None:
    assert await _status(proxy, capsys) == (
        0,
        f"tiny at {proxy.url}: not ready, 0 waiting at the proxy\nno node has joined\n",
        "",
    )
    await proxy.node(stats=BUSY)
    leaving = await proxy.node(stats=QUIET)
    await proxy.node(role="prefill", stats=QUIET)
    async with _draining(leaving):
        await until(lambda: proxy.cluster.pool.get("decode-1").is_draining)
        status, out, err = await _status(proxy, capsys)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    limit = proxy.cluster.pool.get("decode-0").hello.max_num_seqs
    head, names, *rows = out.splitlines()
    assert head == f"tiny at {proxy.url}: ready, 0 waiting at the proxy"
    assert names.split() == ["pool", "node", "health", "running", "waiting", "KV", "use", "preempted", "cache", "hits"]
    assert [row.split() for row in rows] == [
        ["prefill", "prefill-2", "joined", f"0/{limit}", "0", "0%", "0", "-"],
        ["decode", "decode-0", "joined", f"3/{limit}", "4", "75%", "7", "25%"],
        ["decode", "decode-1", "draining", f"0/{limit}", "0", "0%", "0", "-"],
        ["decode", "all", "2", f"3/{2 * limit}", "4", "38%", "7", "25%"],
    ]


async def test_watching_goes_on_when_the_proxy_does_not(proxy: Any) -> None:
    command = [sys.executable, "-m", "tandem", "status", "--url", proxy.url, "--watch", "--interval", "0.1"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            await process.stdout.readuntil(b"no node has joined")
            await proxy.node()
            await process.stdout.readuntil(b"decode-0")
            await proxy.runner.cleanup()
            await process.stdout.readuntil(b"no server answers at")
            process.send_signal(2)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_status_without_a_proxy_or_with_another_server_is_one_line() -> None:
    from tests.tandem.scripted_endpoint import running_endpoint

    def refused(url: str, *flags: str) -> str:
        command = [sys.executable, "-m", "tandem", "status", "--url", url, *flags]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        return result.stderr

    assert "no server answers at http://127.0.0.1:1" in refused("http://127.0.0.1:1", "--watch")
    with running_endpoint() as endpoint:
        assert "there is no /nodes" in refused(endpoint.url)
        endpoint.pages["/nodes"] = b"[]"
        assert "names no nodes: is it a Tandem proxy?" in refused(endpoint.url)
        endpoint.pages["/nodes"] = b"<html>"
        assert "is no JSON" in refused(endpoint.url)
