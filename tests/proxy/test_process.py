"""`python -m proxy` as a process of its own, on a model directory made here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from common import messages as m

ROOT = Path(__file__).parents[2]
EOS = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


@pytest.fixture
def model_directory(tmp_path: Path, tokenizer: Any) -> Path:
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    save_file({"model.embed_tokens.weight": np.zeros((512, 8), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read_until(self, event: str) -> str:
        """The first log line of an event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if f" {event} " in line:
                    return line
        raise AssertionError(f"no {event} in {self.lines}")

    async def rest(self) -> str:
        _, rest = await self.process.communicate()
        return "".join(self.lines) + rest.decode()


@asynccontextmanager
async def running(directory: Path, *flags: str, **environment: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", str(directory), "--served-model-name", "tiny", "--port", "0"),
        *("--control-endpoint", "tcp://127.0.0.1:*", *flags),
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def field(line: str, name: str) -> str:
    found = re.search(rf"{name}=(\S+)", line)
    assert found is not None, line
    return found[1]


def listening_addresses(pid: int) -> set[str]:
    """Local addresses of the process's listening TCP sockets, in the kernel's notation."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [row.split() for row in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def resident_bytes(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) << 10


async def test_serves_and_stops_cleanly(model_directory: Path, scripted_node: Any, tokenizer: Any) -> None:
    """O-02, O-07: loopback only, the key in no log; SIGTERM ends it with status 0."""
    async with running(model_directory, TANDEM_API_KEY="SECRET1") as proxy:
        endpoint = field(await proxy.read_until("control_listening"), "endpoint")
        url = field(await proxy.read_until("http_listening"), "url")
        assert listening_addresses(proxy.process.pid) == {"0100007F"}
        await scripted_node(endpoint, lambda _: [tokenizer.encode("Hello"), [EOS]])
        headers = {"Authorization": "Bearer SECRET1"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            async with http.post("/v1/chat/completions", json=body) as reply:
                assert (await reply.json())["choices"][0]["message"]["content"] == "Hello"
            async with http.get("/v1/models", headers={"Authorization": "no"}) as reply:
                assert reply.status == 401
        assert resident_bytes(proxy.process.pid) < 250 << 20
        proxy.process.send_signal(signal.SIGTERM)
        log = await proxy.rest()
    assert proxy.process.returncode == 0, log
    assert "SECRET1" not in log
    assert " stopped" in log


async def test_it_takes_the_file_descriptors_it_may_have_and_says_when_they_run_out(model_directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # the child begins with it
    try:
        async with running(model_directory) as proxy:
            await proxy.read_until("http_listening")
            pid = proxy.process.pid
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (min(hard, 2**20), hard)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), hard))
            assert "allow more (ulimit -n" in await proxy.read_until("nearly")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_running_stream_finishes_within_the_grace_and_the_process_exits_at_once(
    model_directory: Path, scripted_node: Any, tokenizer: Any, wait: Any
) -> None:
    async with running(model_directory, "--shutdown-grace-seconds", "60") as proxy:
        endpoint = field(await proxy.read_until("control_listening"), "endpoint")
        url = field(await proxy.read_until("http_listening"), "url")
        node = await scripted_node(endpoint, lambda _: [tokenizer.encode("Hello"), wait, [EOS]])
        async with aiohttp.ClientSession(url) as http, aiohttp.ClientSession(url) as idle:
            async with idle.get("/health"):
                pass  # its connection stays open
            async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as reply:
                await reply.content.readline()
                proxy.process.send_signal(signal.SIGTERM)
                await proxy.read_until("stopping")
                async with idle.get("/ready") as refusal:
                    assert refusal.status == 503
                async with idle.post("/v1/completions", json={"prompt": "x"}) as refusal:
                    assert refusal.status == 503
                    assert "shutting down" in (await refusal.json())["error"]["message"]
                node.resume.set()
                text = await reply.text()
            assert text.rstrip().endswith("[DONE]")
            assert '"finish_reason":"stop"' in text
            await asyncio.wait_for(proxy.process.wait(), 5)
    assert proxy.process.returncode == 0


@pytest.mark.parametrize("how", ["grace over", "second signal"])
async def test_what_outlives_the_grace_ends_with_an_error(
    model_directory: Path, scripted_node: Any, tokenizer: Any, wait: Any, how: str
) -> None:
    grace = "0.1" if how == "grace over" else "60"
    async with running(model_directory, "--shutdown-grace-seconds", grace) as proxy:
        endpoint = field(await proxy.read_until("control_listening"), "endpoint")
        url = field(await proxy.read_until("http_listening"), "url")
        node = await scripted_node(endpoint, lambda _: [tokenizer.encode("Hello"), wait])
        body = {"prompt": "x", "stream": True}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as reply:
            assert reply.status == 200
            await reply.content.readline()
            proxy.process.send_signal(signal.SIGINT)
            if how == "second signal":
                await proxy.read_until("stopping")
                proxy.process.send_signal(signal.SIGINT)
            lines = (await reply.text()).split()
            await asyncio.wait_for(proxy.process.wait(), 5)
        assert proxy.process.returncode == 0
        assert "shutting down" in " ".join(lines)
        assert lines[-1] == "[DONE]"
        await node.expect(m.Abort)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--control-endpoint", "tcp://0.0.0.0:0"], "not encrypted"),
        (["--chat-template", "/no/such/file"], "chat-template"),
        (["--generation-config", "none"], "--generation-config"),
        (["--port", "99999"], "--port"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
async def test_what_it_cannot_start_with_is_named(model_directory: Path, flags: list[str], words: str) -> None:
    async with running(model_directory, *flags) as proxy:
        log = await proxy.rest()
    assert proxy.process.returncode in (1, 2)
    assert words in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "temperature", "max_tokens"), [([], 0.25, 7), (["--generation-config", "vllm"], 1.0, None)]
)
async def test_sampling_defaults_of_the_model(
    model_directory: Path,
    scripted_node: Any,
    tokenizer: Any,
    flags: list[str],
    temperature: float,
    max_tokens: int | None,
) -> None:
    config = {"temperature": 0.25, "max_new_tokens": 7}
    (model_directory / "generation_config.json").write_text(json.dumps(config))
    async with running(model_directory, *flags) as proxy:
        endpoint = field(await proxy.read_until("control_listening"), "endpoint")
        url = field(await proxy.read_until("http_listening"), "url")
        assert any("sampling_defaults temperature=0.25 max_tokens=7" in line for line in proxy.lines) == (not flags)
        node = await scripted_node(endpoint, lambda _: [tokenizer.encode("Hello"), [EOS]])
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
        params = (await node.expect(m.Decode)).params
    assert params.temperature == temperature
    assert params.max_tokens == (max_tokens or 2048 - len(tokenizer.encode("Hi")))


async def test_a_port_in_use_is_named(model_directory: Path, unused_tcp_port: int) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", unused_tcp_port)
    for flags in (
        ["--port", str(unused_tcp_port)],
        ["--control-endpoint", f"tcp://127.0.0.1:{unused_tcp_port}"],
    ):
        async with running(model_directory, *flags) as proxy:
            log = await proxy.rest()
        assert proxy.process.returncode == 1, log
        assert str(unused_tcp_port) in log
    server.close()
    await server.wait_closed()
