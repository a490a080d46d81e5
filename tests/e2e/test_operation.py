"""What an operator does to a running service: empty its prefix caches, record its steps and look at them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import Service
from common.engine.step_log import read_step_log
from tandem.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def _num_cached(client: Any, prompt: list[int]) -> int:
    return int(client.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_reset_prefix_cache_reaches_every_node(split: Any, filler: Callable[[int, int], list[int]]) -> None:
    prompt = filler(200, 771)
    assert _num_cached(split, prompt) == 0
    assert _num_cached(split, prompt) > 100
    reply = split.http.post("/reset_prefix_cache")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "num_nodes": 2})
    assert _num_cached(split, prompt) == 0
    for node in split.service.nodes:  # by each node's own HTTP server too
        if node.role != "proxy":
            assert split.http.post(f"{node.url}/reset_prefix_cache").json() == {"status": "ok"}
    assert _num_cached(split, prompt) == 0


def test_steps_are_recorded_and_drawn(
    own_parts: Callable[[], Service], connect: Callable[[Service], Any], tmp_path: Path, capsys: Any
) -> None:
    service, files = own_parts(), {role: tmp_path / f"{role}.jsonl" for role in ("prefill", "decode")}
    service.start_proxy()
    for role, file in files.items():
        service.start_node(role, "--record-steps", str(file))
    service.wait_ready()
    connect(service).complete(list(range(100, 300)), max_tokens=8, ignore_eos=True)
    for node in service.nodes[1:]:
        node.kill(signal.SIGTERM)  # what is still in its buffer is written
    logs = {role: read_step_log(file) for role, file in files.items()}
    assert {role: log.header.role for role, log in logs.items()} == {"prefill": "prefill", "decode": "decode"}
    assert sum(record.num_prefill_tokens for record in logs["prefill"].records) == 200
    assert sum(record.num_outputs for record in logs["decode"].records) == 8
    assert main(["steps", str(files["decode"])]) == 0
    assert ", 8 outputs" in capsys.readouterr().out
    assert (tmp_path / "decode.png").stat().st_size > 10_000
