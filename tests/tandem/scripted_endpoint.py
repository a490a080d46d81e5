"""An OpenAI endpoint that plays a script: each chat request takes the next answer, and what was asked is kept."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """pieces: of the text, each an event. error: an error event after them. status: instead of an answer.
    holds: the answer stays open after its pieces until `release`."""

    pieces: list[str] = field(default_factory=list)
    num_tokens: int | None = None
    finish_reason: str | None = "stop"
    error: dict[str, Any] | None = None
    status: int = 200
    body: bytes = b""
    holds: bool = False


class ScriptedEndpoint:
    def __init__(self, url: str) -> None:
        self.url = url
        self.models = ["tiny", "large"]
        self.key: str | None = None
        self.answers: deque[Script] = deque()
        self.asked: list[dict[str, Any]] = []
        self.pages: dict[str, bytes] = {}
        self.release = threading.Event()

    def messages(self, number: int) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.asked[number]["messages"]]


@contextmanager
def running_endpoint() -> Iterator[ScriptedEndpoint]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    endpoint = ScriptedEndpoint(f"http://127.0.0.1:{server.server_address[1]}")
    server.endpoint = endpoint
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    @property
    def _endpoint(self) -> ScriptedEndpoint:
        return self.server.endpoint

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": name} for name in self._endpoint.models]})
        elif self.path in self._endpoint.pages:
            self._send_bytes(200, self._endpoint.pages[self.path])
        else:
            self._send(404, {"error": {"message": f"there is no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_let_in():
            return
        self._endpoint.asked.append(body)
        script = self._endpoint.answers.popleft()
        if script.status != 200:
            self._send_bytes(script.status, script.body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()  # the connection's end is the answer's
        try:
            self._play(script)
        except (BrokenPipeError, ConnectionResetError):  # the other side has heard enough
            self.close_connection = True

    def _play(self, script: Script) -> None:
        if script.body:
            self.wfile.write(script.body)
            return
        for piece in script.pieces:
            self._event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
        if script.holds:
            self._endpoint.release.wait(60)
        if script.error is not None:
            self._event({"error": script.error})
            return
        if script.finish_reason is not None:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish_reason}]})
            if script.num_tokens is not None:
                self._event({"choices": [], "usage": {"completion_tokens": script.num_tokens}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _is_let_in(self) -> bool:
        key = self._endpoint.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._send(401, {"error": {"message": "a valid API key is required"}})
        return False

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode())

    def _send_bytes(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
