"""A Tandem service of separate processes on this machine, for benchmarks and end-to-end tests.

The parts are started by hand, as the README shows, on free ports, each with a log file of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 120.0


@dataclass
class Node:
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        self.process.send_signal(signal_number)
        if signal_number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(90)

    def tail(self, num_lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@dataclass
class Service:
    """One proxy and any number of nodes; nodes may be added and killed while it runs."""

    model: str
    folder: Path
    node_flags: Sequence[str] = ()
    proxy_flags: Sequence[str] = ()
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port, self.control_port = free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control(self) -> str:
        return f"tcp://127.0.0.1:{self.control_port}"

    @property
    def proxy_pid(self) -> int:
        return next(n.process.pid for n in self.nodes if n.role == "proxy")

    def start_proxy(self) -> Node:
        flags = ["--port", str(self.port), "--control-endpoint", self.control, *self.proxy_flags]
        return self._start("proxy", flags, self.port)

    def start_node(self, role: str, *flags: str) -> Node:
        """`role` is "prefill" or "decode"; later flags win over the service's own."""
        port = free_port()
        return self._start(role, ["--proxy", self.control, "--port", str(port), *self.node_flags, *flags], port)

    def _start(self, role: str, flags: Sequence[str], port: int) -> Node:
        module = role if role == "proxy" else f"{role}_node"
        log = self.folder / f"{role}-{len(self.nodes)}.log"
        command = [sys.executable, "-m", module, "--model", self.model, *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        node = Node(role, process, log, port)
        self.nodes.append(node)
        return node

    def wait_ready(self, num_nodes: int | None = None, seconds: float = READY_SECONDS) -> None:
        """Until the proxy and every node answer /ready; raises with the log of a part that died."""
        deadline = time.monotonic() + seconds
        for node in self.nodes[:num_nodes]:
            while not is_ready(node.url):
                if node.process.poll() is not None:
                    raise RuntimeError(f"{node.role} exited with {node.process.returncode}:\n{node.tail()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{node.role} is not ready after {seconds:.0f} s:\n{node.tail()}")
                time.sleep(0.05)

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.process.terminate()
        deadline = time.monotonic() + 10
        for node in self.nodes:
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()


@contextmanager
def start_service(
    model: str,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    node_flags: Sequence[str] = (),
    proxy_flags: Sequence[str] = (),
) -> Iterator[Service]:
    """A ready service; everything it started is ended on exit."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        service = Service(model, Path(folder), node_flags, proxy_flags)
        try:
            service.start_proxy()
            for _ in range(num_prefill):
                service.start_node("prefill")
            for _ in range(num_decode):
                service.start_node("decode")
            service.wait_ready()
            yield service
        finally:
            service.close()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
