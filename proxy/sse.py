"""Server-sent events: `data: {json}` frames, `data: [DONE]` last. Knows HTTP and JSON, and nothing of their meaning.

A client that stops reading is waited for, up to a deadline; what its connection may hold meanwhile is bounded by the
transport's own limit.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream otherwise
}
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def frame(body: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


class ClientStalledError(ConnectionResetError):
    """The client did not read for too long; it counts as gone."""


class EventStream:
    """One response. `open` sends the headers; errors before that can still have a status of their own."""

    def __init__(self, request: web.Request, *, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, *bodies: dict[str, Any]) -> None:
        """Raises ConnectionResetError when the client is gone or does not read."""
        await self._write(b"".join(map(frame, bodies)))

    async def finish(self) -> None:
        await self._write(DONE)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(data)
        except TimeoutError:
            raise ClientStalledError(f"client did not read for {self._stall_seconds:g} s") from None
