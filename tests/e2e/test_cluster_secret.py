"""A service of real processes with a cluster secret: it answers, and a node without the secret stays outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service import Service, free_port
from common.cluster_secret import new_secret_text

pytestmark = pytest.mark.e2e


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(new_secret_text())
    path.chmod(0o600)
    return path


def test_a_service_with_a_secret_answers_and_keeps_strangers_out(
    own_parts: Callable[[], Service], connect: Any, filler: Callable[[int, int], list[int]], secret_file: Path
) -> None:
    service = own_parts()
    with_secret = ["--cluster-secret-file", str(secret_file)]
    service.proxy_flags = with_secret
    fetch_port = str(free_port())
    service.start_proxy()
    over_tcp = ["--fetch-port", fetch_port, "--fetch-advertise", f"tcp://127.0.0.1:{fetch_port}"]
    service.start_node("prefill", *with_secret, *over_tcp)
    decode = service.start_node("decode", *with_secret)
    service.wait_ready()
    stranger = service.start_node("prefill")
    client = connect(service)
    assert len(client.token_ids(filler(200, 7), max_tokens=8)) == 8
    assert 'tandem:fetches_total{outcome="complete",side="client"} 1.0' in client.metrics(decode)
    reason = not_ready_reason(stranger.url, "--cluster-secret-file")
    assert service.control in reason
    assert " at " + service.control in service.nodes[0].log.read_text()
    text = "".join(node.log.read_text() for node in service.nodes)
    assert secret_file.read_text() not in text


def not_ready_reason(url: str, words: str, seconds: float = 60.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            reply = httpx.get(f"{url}/ready", timeout=5, trust_env=False)
        except httpx.TransportError:
            continue  # it still loads its model
        assert reply.status_code == 503
        if words in reply.text:
            return reply.text
    raise AssertionError(f"not ready for another reason: {reply.text}")
