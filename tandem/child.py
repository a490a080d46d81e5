"""One supervised process: started in a group of its own, its output kept in a log file, stopped politely, then not.

The kernel kills it when the supervisor dies, however that happens (PR_SET_PDEATHSIG), so none is ever left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NUM_TAIL_LINES = 200
_MAX_LINE_BYTES = 1 << 20
_KILL_SECONDS = 2.0


@dataclass(frozen=True)
class ChildSpec:
    """What to start; `health_url` + "/ready" answers 200 when it is ready."""

    name: str
    role: str
    command: Sequence[str]
    health_url: str
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """A running process of a spec. `on_line(name, line)` hears every line it writes."""

    def __init__(self, spec: ChildSpec, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.log_path = log_path
        self.tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._on_line = on_line
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
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.spec.environment},
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone, which stops all in order
            preexec_fn=_die_with_parent(os.getpid()),
            limit=_MAX_LINE_BYTES,
        )
        self._reader = asyncio.create_task(self._read_output(self._process))

    async def wait(self) -> int:
        """The exit code, once it has ended and all its output is read."""
        code = await self._running().wait()
        if self._reader is not None:
            # a grandchild may hold the pipe open for ever
            await asyncio.wait({self._reader}, timeout=1.0)
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

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with self.log_path.open("wb") as log:
            while data := await _next_line(process.stdout):
                log.write(data)
                log.flush()
                line = data.decode(errors="replace").rstrip("\n")
                self.tail.append(line)
                self._on_line(self.spec.name, line)


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Empty at the end. A line longer than the limit comes in pieces."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """For the child, between fork and exec. libc is loaded beforehand: after a fork it might not be possible."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)

    return prepare
