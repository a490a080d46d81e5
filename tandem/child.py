"""One supervised process: started in a group of its own, its output kept in a log file, stopped politely, then not.

Its output is read to the end whatever becomes of the log file and of who listens: a process whose pipe is full stands
still. The kernel kills it when the supervisor dies, so none is ever left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from common.child_process import die_with_parent

log = logging.getLogger(__name__)

_NUM_TAIL_LINES = 200
_MAX_LINE_BYTES = 1 << 20
_KILL_SECONDS = 2.0
_LAST_OUTPUT_SECONDS = 1.0


@dataclass(frozen=True)
class ChildSpec:
    """What to start; `health_url` + "/ready" answers 200 when it is ready."""

    name: str
    role: str
    command: Sequence[str]
    health_url: str
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """A running process of a spec. `on_line(name, line)` hears every line it writes, `report(message)` what is wrong
    with its log file."""

    def __init__(
        self, spec: ChildSpec, log_path: Path, on_line: Callable[[str, str], None], report: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.log = _LogFile(log_path)
        self.tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._on_line = on_line
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._running().returncode

    async def start(self) -> None:
        # a pipe of our own: asyncio's wait() would wait for the end of its pipe too, which a grandchild may hold
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone, which stops all in order
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read_output(read_end))

    async def wait(self) -> int:
        """The exit code, once it has ended and its output is read, unless a grandchild goes on writing."""
        code = await self._running().wait()
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_LAST_OUTPUT_SECONDS)
        return code

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM; again after `grace_seconds`, in case it still drains; in the end SIGKILL to its whole group."""
        if self._process is None:
            return
        for seconds in (grace_seconds, _KILL_SECONDS):
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._running().wait(), seconds)
                break
        self.kill()
        await self.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to whatever is left of its group; it may have ended already."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._running().send_signal(number)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.spec.name} was not started"
        return self._process

    async def _read_output(self, read_end: int) -> None:
        stream = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", buffering=0)
        )
        with contextlib.closing(transport), contextlib.closing(self.log):
            self._keep(b"")  # so that a file that cannot be written is told of at once
            while data := await _next_line(stream):
                self._keep(data)
                line = data.decode(errors="replace").rstrip("\n")
                self.tail.append(line)
                self._tell(line)

    def _keep(self, data: bytes) -> None:
        try:
            self.log.write(data)
        except OSError as error:
            name = self.spec.name
            self._report(
                f"[{name}] its log {self.log.path} cannot be written ({error.strerror}); {name} goes on, what it says"
                " from now on is not kept"
            )

    def _tell(self, line: str) -> None:
        try:
            self._on_line(self.spec.name, line)
        except Exception:
            log.exception("a line of %s was not shown", self.spec.name)


class _LogFile:
    """Takes lines until it cannot be written for the first time; is_whole: that has not happened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_whole = True
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        """Raises OSError once; does nothing from then on."""
        if not self.is_whole:
            return
        try:
            if self._file is None:
                self._file = self.path.open("wb", buffering=0)
            while data:  # a disk that is nearly full takes a part
                data = data[self._file.write(data) :]
        except OSError:
            self.is_whole = False
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Empty at the end. A line longer than the limit comes in pieces."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
