"""What the operating system is asked to do about a client that is silent: to look whether it is still there."""

from __future__ import annotations

import socket
from pathlib import Path

from kvtransfer.transports.zmq import ZmqTransport

KEEPALIVE_TIMER = "02"  # proc(5), /proc/net/tcp


def timers(local_port: int, remote_port: int) -> list[str]:
    """Which timer runs for the connection, as the side at `local_port` has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = (f":{local_port:04X}", f":{remote_port:04X}")
    return [row[5].partition(":")[0] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]


def test_a_fetch_server_has_its_clients_looked_after() -> None:
    transport = ZmqTransport()
    server = transport.bind(["tcp://127.0.0.1:0"], 1000)
    port = int(server.endpoints[0].rpartition(":")[2])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            assert client.recv(1) == b"\xff"  # it has greeted us, and what was sent is acknowledged a moment later
            while "01" in (running := timers(port, client.getsockname()[1])):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            assert running == [KEEPALIVE_TIMER]
    finally:
        server.close()
        transport.close()
