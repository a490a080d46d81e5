"""Scripted children: tiny processes that answer /ready, and die or ignore signals as told."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.child import ChildSpec

# argv: port, then words. "stubborn" ignores SIGTERM; "dies" ends after its first /ready; "never" is never ready
_SCRIPT = """
import http.server, os, signal, sys
port, words = int(sys.argv[1]), sys.argv[2:]
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in words else lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "never" in words else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
print("2026-01-01T00:00:00.000 info child started", flush=True)
print("2026-01-01T00:00:00.000 warning child beware", flush=True)
if "json" in words:
    head = '{"time": "2026-01-01T00:00:00.001", "level": "warning", "process": "child"'
    print(head + ', "event": "odd", "n": 3}', flush=True)
if "fails" in words:
    print("cannot load the model", flush=True)
    sys.exit(3)
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
if "dies" in words:
    server.handle_request()
    print("out of luck", flush=True)
    os._exit(7)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TANDEM_") and name != "TANDEM_CACHE_DIR"]:
        monkeypatch.delenv(name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def child_spec() -> Callable[..., ChildSpec]:
    def make(name: str, role: str, *words: str) -> ChildSpec:
        port = free_port()
        return ChildSpec(name, role, [sys.executable, "-c", _SCRIPT, str(port), *words], f"http://127.0.0.1:{port}")

    return make


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    path.mkdir()
    return path
