"""Servers in processes of their own that are killed, stopped and replaced while they serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.messages import Source

ROOT = Path(__file__).parents[2]


class ServerProcess:
    def __init__(self, instance_id: str, endpoint: str, num_blocks: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("serve_scripted.py")), instance_id, endpoint]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [*command, str(num_blocks)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        self.source = Source(instance_id, json.loads(self._process.stdout.readline()))

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


@pytest.fixture
def start_process() -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(instance_id: str, endpoint: str = "tcp://127.0.0.1:0", num_blocks: int = 0) -> ServerProcess:
        started.append(ServerProcess(instance_id, endpoint, num_blocks))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def wait_for_block(fetching, block: int) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 10
    while fetching.receiver.block(fetching.block_ids[block])[:1] == b"\xaa":
        assert time.monotonic() < deadline, f"block {block} did not come"
        time.sleep(0.001)


def test_a_killed_server_ends_the_fetch_at_once_with_what_had_come(start_process, make_receiver) -> None:  # type: ignore[no-untyped-def]
    process = start_process("server", num_blocks=4)
    fetching = make_receiver().fetch(process.source, 100)
    wait_for_block(fetching, 3)
    started = time.monotonic()
    process.kill()
    assert str(fetching.listener.wait_ended()).startswith("connection_lost: ")
    assert time.monotonic() - started < 1.0  # not after the lease, which is 10 s
    assert fetching.listener.num_complete_blocks == 4
    fetching.assert_blocks_right()


def test_a_stopped_server_ends_the_fetch_after_the_lease(start_process, make_receiver) -> None:  # type: ignore[no-untyped-def]
    process = start_process("server", num_blocks=4)
    fetching = make_receiver(lease_seconds=1.0).fetch(process.source, 100)
    wait_for_block(fetching, 3)
    process.send(signal.SIGSTOP)
    started = time.monotonic()
    assert str(fetching.listener.wait_ended()).startswith("silent: ")
    assert time.monotonic() - started < 3.0
    assert fetching.listener.num_complete_blocks == 4
    before = bytes(fetching.receiver.pool)
    process.send(signal.SIGCONT)
    again = fetching.receiver.fetch(process.source, 16)
    wait_for_block(again, 1)
    untouched = [block for block in range(256) if block not in again.block_ids]
    assert all(fetching.receiver.block(b) == before[b * 512 : (b + 1) * 512] for b in untouched)


def test_a_server_restarted_at_the_same_address_is_another_one(start_process, make_receiver) -> None:  # type: ignore[no-untyped-def]
    """D-10: the first fetch after the restart succeeds when it names the new instance, and is refused when not."""
    first = start_process("first")
    receiver = make_receiver()
    receiver.fetch(first.source, 50).wait_complete()
    first.kill()
    second = start_process("second", first.source.endpoints[0])
    assert second.source.endpoints == first.source.endpoints
    stale = receiver.fetch(first.source, 50)
    assert str(stale.listener.wait_ended()).partition(":")[0] in ("wrong_instance", "connection_lost")
    receiver.fetch(second.source, 50).wait_complete()
    stale = receiver.fetch(first.source, 50)
    assert stale.listener.wait_ended() == "wrong_instance: meant for instance first, but this is second"
