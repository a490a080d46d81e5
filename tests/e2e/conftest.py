"""A real service of separate processes on the real model, and clients to ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from benchmarks.load import filler as make_filler
from benchmarks.service import Node, Service, start_service

MODEL = "smollm2-135m-instruct"
ONE_THREAD = ["--num-threads", "1"]


class Client:
    """Raw HTTP to one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(base_url=service.url, timeout=120, trust_env=False, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def complete(self, prompt: str | list[int], **extra: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "return_token_ids": True, **extra}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def token_ids(self, prompt: str | list[int], **extra: Any) -> list[int]:
        return list(self.complete(prompt, **extra)["choices"][0]["token_ids"])

    def check_case(self, case: Any) -> None:
        case.check(self.token_ids(case.prompt_token_ids))

    def metric(self, node: Node, name: str) -> float:
        return metric(node, name)

    def metrics(self, node: Node) -> str:
        return httpx.get(f"{node.url}/metrics", timeout=5, trust_env=False).text

    def assert_pools_idle(self, seconds: float = 2.0) -> None:
        assert_pools_idle(self.service, seconds)


def metric(node: Node, name: str) -> float:
    """Sum over a metric's series at one node."""
    text = httpx.get(f"{node.url}/metrics", timeout=5, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def assert_pools_idle(service: Service, seconds: float = 2.0) -> None:
    """Every node's pool holds cached blocks only: nothing runs, waits or is held, and all blocks are free."""
    deadline = time.monotonic() + seconds
    while True:
        held = {
            f"{node.role}:{node.port}": metric(node, "vllm:kv_cache_usage_perc")
            for node in service.nodes
            if node.role != "proxy" and node.process.poll() is None
        }
        if not any(held.values()):
            return
        assert time.monotonic() < deadline, f"blocks still held after {seconds} s: {held}"
        time.sleep(0.02)


def run_together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """Runs all calls at once; their results in order."""
    return run_together


@pytest.fixture
def filler() -> Callable[[int, int], list[int]]:
    """A prompt of so many ordinary tokens, for a salt, that no cache knows."""
    return make_filler


@pytest.fixture
def own_service() -> Iterator[Callable[..., Client]]:
    """Starts a ready service of its own for a test that harms it."""
    with ExitStack() as stack:

        def start(*, node_flags: Sequence[str] = (), **shape: int) -> Client:
            service = stack.enter_context(start_service(MODEL, node_flags=[*ONE_THREAD, *node_flags], **shape))
            return stack.enter_context(Client(service))

        yield start


@pytest.fixture
def own_parts(tmp_path: Path) -> Iterator[Callable[[], Service]]:
    """A service without any process yet."""
    with ExitStack() as stack:

        def make() -> Service:
            service = Service(MODEL, tmp_path, ONE_THREAD)
            stack.callback(service.close)
            return service

        yield make


@pytest.fixture(scope="session")
def split() -> Iterator[Client]:
    """One proxy, one prefill node, one decode node."""
    with start_service(MODEL, node_flags=ONE_THREAD) as service, Client(service) as client:
        yield client


@pytest.fixture(scope="session")
def single() -> Iterator[Client]:
    """One proxy and one decode node, which prefills itself."""
    with start_service(MODEL, num_prefill=0, node_flags=ONE_THREAD) as service, Client(service) as client:
        yield client


@pytest.fixture
def connect() -> Iterator[Callable[[Service], Client]]:
    with ExitStack() as stack:
        yield lambda service: stack.enter_context(Client(service))
