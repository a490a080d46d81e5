"""The relay that slows a link down: its pace, its delay, its command line, and that bytes come through unchanged."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.slow_link import SlowLink, TokenBucket


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Sends back what it gets, until its one client leaves."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.close()
    thread.join()


def send_and_time(port: int, data: bytes) -> float:
    with socket.create_connection(("127.0.0.1", port)) as client:
        started = time.monotonic()
        client.sendall(data)
        received = bytearray()
        while len(received) < len(data):
            received += client.recv(1 << 16)
        assert received == data
        return time.monotonic() - started


def test_bytes_come_unchanged_and_not_faster_than_the_rate(echo_port: int) -> None:
    data = bytes(range(256)) * 1200
    with SlowLink("127.0.0.1", echo_port, bytes_per_second=1_000_000) as link:
        seconds = send_and_time(link.port, data)
        assert link.num_bytes == 2 * len(data)
    assert seconds > 0.25  # 300 kB, less a burst of 16 KiB


def test_every_byte_is_late_by_the_delay(echo_port: int) -> None:
    with SlowLink("127.0.0.1", echo_port, bytes_per_second=1e9, delay_seconds=0.1) as link:
        seconds = send_and_time(link.port, b"x" * 1000)
    assert 0.2 <= seconds < 1.0


def test_a_target_that_is_not_there_closes_the_connection() -> None:
    with (
        SlowLink("127.0.0.1", 1, bytes_per_second=1e6) as link,
        socket.create_connection(("127.0.0.1", link.port)) as s,
    ):
        assert s.recv(1) == b""


def test_the_bucket_counts() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0)
    assert bucket.wait_seconds(50, now=0.0) == 0.0
    assert bucket.wait_seconds(100, now=0.0) == 1.0
    assert bucket.wait_seconds(100, now=1.0) == 1.0
    assert bucket.wait_seconds(50, now=100.0) == 0.0


def test_the_command_relays(echo_port: int) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "slow_link.py"
    command = [sys.executable, str(script), "--target", f"127.0.0.1:{echo_port}", "--rate", "1e7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        endpoint = process.stdout.readline().split(" ")[0]
        assert send_and_time(int(endpoint.rpartition(":")[2]), b"hello") < 5.0
        process.terminate()


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_second is 0"):
        SlowLink("127.0.0.1", 1, bytes_per_second=0)
