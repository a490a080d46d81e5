"""A TCP relay that lets bytes through at a given rate and delay: a slow network on one machine.

A library, `with SlowLink("127.0.0.1", 5601, bytes_per_second=10e6) as link: dial(link.port)`, and a command,

    python benchmarks/slow_link.py --target 127.0.0.1:5601 --listen 127.0.0.1:5602 --rate 10e6 --delay 0.02

It knows no protocol. A token bucket per direction and connection sets the pace; little is buffered (the sockets'
buffers are small and reading stops while writing waits), so that the sender feels the link as it would a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import threading
from collections import deque
from types import TracebackType

_CHUNK_BYTES = 16 << 10
_SOCKET_BUFFER_BYTES = 64 << 10


class TokenBucket:
    """Refilled at `rate` bytes a second, holds at most `burst`."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._filled_at: float | None = None

    def wait_seconds(self, num_bytes: int, now: float) -> float:
        """Takes the tokens, and says how long to wait until they have really come in."""
        since = 0.0 if self._filled_at is None else now - self._filled_at
        self._filled_at = now
        self._level = min(self._burst, self._level + since * self._rate) - num_bytes
        return max(0.0, -self._level / self._rate)


class SlowLink:
    """Relays connections to `port` of this host to target_host:target_port, both ways at `bytes_per_second`."""

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        bytes_per_second: float,
        delay_seconds: float = 0.0,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
    ) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}, must be more than 0")
        self.num_bytes = 0
        self._target = (target_host, target_port)
        self._rate = bytes_per_second
        self._delay_seconds = delay_seconds
        self._listener = socket.create_server((listen_host, listen_port))
        _make_small(self._listener)
        self.host, self.port = self._listener.getsockname()[:2]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()), name="slow-link", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def start(self) -> None:
        self._thread.start()
        self._is_running.wait()

    def stop(self) -> None:
        """Closes every connection; returns when the thread has ended."""
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def __enter__(self) -> SlowLink:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def serve(self) -> None:
        """Runs until `stop`, or until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._relay(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, sock=self._listener, limit=_CHUNK_BYTES)
        self._is_running.set()
        try:
            await self._stopping.wait()
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = socket.socket()
        _make_small(target)
        target.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(target, self._target)
        except OSError:
            target.close()
            await _close(writer)
            return
        far_reader, far_writer = await asyncio.open_connection(sock=target, limit=_CHUNK_BYTES)
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await _close(writer)
            await _close(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction. What has been read is written `delay_seconds` later, so delay costs no throughput."""
        loop = asyncio.get_running_loop()
        bucket = TokenBucket(self._rate, burst=max(_CHUNK_BYTES, self._rate * 0.01))
        delayed: deque[bytes] = deque()
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                self.num_bytes += len(data)
                await asyncio.sleep(bucket.wait_seconds(len(data), loop.time()))
                if self._delay_seconds:
                    delayed.append(data)
                    loop.call_later(self._delay_seconds, lambda: writer.write(delayed.popleft()))
                else:
                    writer.write(data)
                    await writer.drain()
            await asyncio.sleep(self._delay_seconds)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _make_small(endpoint: socket.socket) -> None:
    """Otherwise the kernel alone would take in several megabytes at full speed."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        endpoint.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description="Relay TCP connections at a limited rate.")
    parser.add_argument("--target", type=_address, required=True, help="HOST:PORT to relay to")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), help="HOST:PORT; port 0 picks a free one")
    parser.add_argument("--rate", type=float, required=True, help="bytes per second, each direction")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each byte is late")
    arguments = parser.parse_args()
    link = SlowLink(
        *arguments.target,
        bytes_per_second=arguments.rate,
        delay_seconds=arguments.delay,
        listen_host=arguments.listen[0],
        listen_port=arguments.listen[1],
    )
    print(f"{link.endpoint} -> {arguments.target[0]}:{arguments.target[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(link.serve())


if __name__ == "__main__":
    main()
