"""Probes, keys, metrics, logs, sockets: what an operator relies on."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import messages as m
from common.errors import ConfigError
from common.logging import configure_logging
from common.plane_security import is_local
from proxy.admission import AdmissionLimits
from proxy.config import ProxyConfig
from proxy.control import ControlSocket

EOS = 2
GOLDEN_NAMES = {
    "tandem:kv_cache_unused_slots",
    "tandem:nodes",
    "tandem:preemptions_total",
    "tandem:request_legs_total",
    "tandem:swap_blocks",
    "tandem:swap_blocks_free",
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_swapped",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
ROOT = Path(__file__).parents[2]
KEY = "SECRET1"


async def test_probes(proxy: Any) -> None:
    for path, status in (("/health", 200), ("/ready", 503), ("/version", 200), ("/metrics", 200)):
        async with proxy.http.get(path) as reply:
            assert reply.status == status, path
    await proxy.node()
    async with proxy.http.get("/ready") as reply:
        assert reply.status == 200


async def test_a_prefill_node_alone_is_not_ready(proxy: Any) -> None:
    await proxy.node(role="prefill")
    async with proxy.http.get("/ready") as reply:
        assert reply.status == 503


async def test_models_entry(proxy: Any) -> None:
    async with proxy.http.get("/v1/models") as reply:
        [entry] = (await reply.json())["data"]
    assert entry["max_model_len"] == 4096  # the model's own, as long as no node is here
    await proxy.node()
    async with proxy.http.get("/v1/models/tiny") as reply:
        entry = await reply.json()
    assert entry["max_model_len"] == 2048
    assert (entry["id"], entry["object"], entry["owned_by"]) == ("tiny", "model", "tandem")


# --- keys -----------------------------------------------------------------------------------------------------------


async def test_every_route_needs_the_key(start_proxy: Any) -> None:
    """O-03: walk the route table, and odd spellings."""
    proxy = await start_proxy(api_key=KEY)
    await proxy.node(lambda _: [[EOS]])
    routes = [(route.method, route.resource.canonical) for route in proxy.app.router.routes()]
    odd = ["//v1/completions", "/V1/completions", "/v1/x/../completions", "/v1/completions/", "/health/", "//health"]
    for method, path in [*routes, *(("POST", path) for path in odd), ("OPTIONS", "/v1/models"), ("GET", "/nope")]:
        async with proxy.request(method, path.replace("{model}", "tiny")) as reply:
            assert reply.status == (200 if path in ("/health", "/ready") else 401), (method, path)


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer", "", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer \xe9"])
async def test_wrong_keys(start_proxy: Any, value: str) -> None:
    proxy = await start_proxy(api_key=KEY)
    async with proxy.http.get("/v1/models", headers={"Authorization": value}) as reply:
        assert reply.status == 401
        body = await reply.text()
    assert KEY not in body
    assert "wrong" not in body
    assert (await _get_models(proxy, f"Bearer {KEY}")) == 200


async def _get_models(proxy: Any, value: str) -> int:
    async with proxy.http.get("/v1/models", headers={"Authorization": value}) as reply:
        return int(reply.status)


# --- metrics --------------------------------------------------------------------------------------------------------


async def test_metrics_count_what_usage_says(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello", " there"), [EOS]])
    usages = [(await proxy.complete())["usage"] for _ in range(3)]
    metrics = await proxy.metrics()
    label = '{model_name="tiny"}'
    assert metrics[f"vllm:prompt_tokens_total{label}"] == sum(usage["prompt_tokens"] for usage in usages)
    assert metrics[f"vllm:generation_tokens_total{label}"] == sum(usage["completion_tokens"] for usage in usages)
    assert metrics['vllm:request_success_total{finished_reason="stop",model_name="tiny"}'] == 3
    names = "time_to_first_token inter_token_latency e2e_request_latency request_queue_time request_prefill_time"
    for name in [*(f"{name}_seconds" for name in names.split()), "request_prompt_tokens", "request_generation_tokens"]:
        if name != "inter_token_latency_seconds":  # all outputs may have come in one message
            assert metrics[f"vllm:{name}_count{label}"] == 3, name


async def test_metrics_of_nodes(proxy: Any, until: Any) -> None:
    stats = m.NodeStats(
        num_running=2, num_waiting=3, num_blocks=10, num_free_blocks=4, prefix_cache_queries=50, prefix_cache_hits=20
    )
    node = await proxy.node(stats=stats)
    metrics = await proxy.metrics()
    label = f'model_name="tiny",node="{node.instance_id}",role="decode"'
    assert metrics[f"vllm:num_requests_running{{{label}}}"] == 2
    assert metrics[f"vllm:num_requests_waiting{{{label}}}"] == 3
    assert metrics[f"vllm:kv_cache_usage_perc{{{label}}}"] == pytest.approx(0.6)
    assert metrics[f"vllm:prefix_cache_queries_total{{{label}}}"] == 50
    assert metrics[f"vllm:prefix_cache_hits_total{{{label}}}"] == 20
    assert any(name.startswith("vllm:cache_config_info") and 'num_gpu_blocks="10"' in name for name in metrics)
    await node.send(m.Goodbye())
    await until(lambda: not len(proxy.cluster.pool))
    assert not any(node.instance_id in name for name in await proxy.metrics())


async def test_the_golden_list_of_metric_names(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), *proxy.ids(" there"), [EOS]])
    await proxy.complete()
    names = {name.split("{")[0] for name in await proxy.metrics()}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    # How many messages the tokens came in, and so whether there was a gap between two, is chance.
    assert families - {"vllm:inter_token_latency_seconds"} == GOLDEN_NAMES


# --- prefix caches --------------------------------------------------------------------------------------------------


async def test_reset_prefix_cache_tells_every_node_and_waits_until_they_know(proxy: Any) -> None:
    nodes = [await proxy.node(role="prefill"), await proxy.node(), await proxy.node()]
    status, reply = await proxy.post("/reset_prefix_cache", {})
    assert (status, reply) == (200, {"status": "ok", "num_nodes": 3})
    assert [node.count(m.ResetPrefixCache) for node in nodes] == [1, 1, 1]
    async with proxy.http.get("/reset_prefix_cache") as refused:
        assert refused.status == 405
    assert [node.count(m.ResetPrefixCache) for node in nodes] == [1, 1, 1]


async def test_reset_prefix_cache_does_not_wait_for_a_node_that_is_gone(proxy: Any) -> None:
    assert (await proxy.post("/reset_prefix_cache", {}))[1] == {"status": "ok", "num_nodes": 0}
    node = await proxy.node()
    await node.die()
    assert (await proxy.post("/reset_prefix_cache", {}))[1] == {"status": "ok", "num_nodes": 0}


async def test_reset_prefix_cache_is_told_to_a_node_that_comes_back(proxy: Any) -> None:
    node = await proxy.node()
    await proxy.post("/reset_prefix_cache", {})
    assert node.count(m.ResetPrefixCache) == 1
    await node.send(node.hello)  # as after a gap, or a time in which it was lost
    await node.expect(m.ResetPrefixCache, 2)
    new = await proxy.node()
    await new.send(new.hello)
    await new.expect(m.Welcome, 2)
    await proxy.post("/reset_prefix_cache", {})
    assert new.count(m.ResetPrefixCache) == 1  # nothing was reset in its time before


async def test_prefill_nodes_reset_their_prefix_caches_before_decode_nodes(proxy: Any, until: Any) -> None:
    prefill, decode = await proxy.node(role="prefill"), await proxy.node()
    prefill.is_silent = True
    reset = asyncio.create_task(proxy.post("/reset_prefix_cache", {}))
    await until(lambda: prefill.count(m.ResetPrefixCache))
    assert not decode.count(m.ResetPrefixCache)
    prefill.is_silent = False
    assert (await reset)[1] == {"status": "ok", "num_nodes": 2}
    assert decode.count(m.ResetPrefixCache) == 1


# --- load -----------------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_429_with_retry_after(start_proxy: Any, wait: Any, until: Any) -> None:
    proxy = await start_proxy(admission=AdmissionLimits(max_queue=1, queue_seconds=60))
    node = await proxy.node(lambda _: [wait], max_num_seqs=1)
    running = [asyncio.create_task(proxy.complete()) for _ in range(2)]  # one more than runs is let in
    await node.expect(m.Decode, 2)
    waiting = asyncio.create_task(proxy.complete())
    await until(lambda: proxy.cluster.admission.num_waiting == 1)
    async with proxy.http.post("/v1/completions", json={"prompt": "x"}) as reply:
        assert reply.status == 429
        assert int(reply.headers["Retry-After"]) >= 1
        assert (await reply.json())["error"]["code"] == "rate_limit_exceeded"
    assert (await proxy.metrics())['vllm:num_requests_waiting{model_name="tiny",node="proxy",role="proxy"}'] == 1
    for task in [*running, waiting]:
        task.cancel()


async def test_no_node_is_503_with_retry_after(start_proxy: Any) -> None:
    proxy = await start_proxy(admission=AdmissionLimits(node_wait_seconds=0.05))
    async with proxy.http.post("/v1/completions", json={"prompt": "x"}) as reply:
        assert reply.status == 503
        assert reply.headers["Retry-After"]


async def test_a_request_waits_for_the_first_node(proxy: Any, until: Any) -> None:
    task = asyncio.create_task(proxy.complete())
    await until(lambda: proxy.cluster.admission.num_waiting == 1)
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert (await task)["choices"][0]["text"] == "Hello"


async def test_many_at_once(proxy: Any) -> None:
    await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]], max_num_seqs=4)
    replies = await asyncio.gather(*(proxy.complete(prompt=f"{i}") for i in range(60)))
    assert all(reply["choices"][0]["text"] == "Hello" for reply in replies)


# --- sockets, secrets, imports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:8100", "tcp://*:8100", "tcp://10.0.0.1:8100", "tcp://[::]:8100"])
def test_the_control_socket_is_loopback_unless_told(endpoint: str) -> None:
    """O-02."""
    with pytest.raises(ConfigError, match="--insecure"):
        ControlSocket(endpoint, "proxy", lambda *_: None, lambda *_: None)


def test_defaults_are_loopback() -> None:
    """O-02."""
    config = ProxyConfig()
    assert config.host == "127.0.0.1"
    assert is_local(config.control_endpoint)
    assert not config.insecure


def test_the_key_is_masked_in_a_printed_config() -> None:
    """O-07."""
    config = ProxyConfig(api_key=KEY)
    assert KEY not in repr(config)
    assert KEY not in config.model_dump_json()


async def test_logs_hold_no_prompt_no_answer_and_no_key(start_proxy: Any, monkeypatch: Any) -> None:
    """O-07: one request, one that is refused, one that fails inside."""
    stream = io.StringIO()
    root = logging.getLogger()
    saved = root.handlers[:], root.level
    configure_logging("debug", "proxy", stream)
    try:
        proxy = await start_proxy(api_key=KEY)
        proxy.http.headers["Authorization"] = f"Bearer {KEY}"
        await proxy.node(lambda _: [*proxy.ids("ANSWER"), [EOS]])
        await proxy.complete(prompt="MARKER")
        await proxy.post("/v1/completions", {"prompt": "MARKER", "temperature": "MARKER"})
        monkeypatch.setattr(proxy.tokenizer, "encode", _fail_with_text)
        status, reply = await proxy.post("/v1/completions", {"prompt": "MARKER"})
        assert status == 500
        assert "MARKER" not in str(reply)
    finally:
        root.handlers[:], root.level = saved
    text = stream.getvalue()
    assert "request_ended" in text
    assert "request_failed" in text
    assert "error=RuntimeError" in text
    assert not [word for word in ("MARKER", "ANSWER", KEY) if word in text]


def _fail_with_text(text: str, **_: object) -> list[int]:
    raise RuntimeError(f"cannot encode {text}")


def test_the_proxy_imports_no_torch() -> None:
    code = (
        "import sys, proxy.app, proxy.__main__\n"
        "found = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not found, found\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "resident = int(status['VmRSS'].split()[0]) // 1024\n"
        "assert resident < 150, f'{resident} MB without a model'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_help_names_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "--help"], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True
    )
    for name in ProxyConfig.model_fields:
        assert "--" + name.replace("_", "-") in done.stdout
