"""Runs a set of processes as one: all become ready, or all stop; a death is named; nothing outlives the end.

    start all -> wait until each is ready -> watch: a prefill node may go, the proxy or the last decode node may not
             \\_ any death ____________/                 -> stop all (SIGTERM together, deadlines, SIGKILL)

Knows roles and exit codes, no flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from common.errors import UnavailableError
from tandem.child import Child, ChildSpec
from tandem.log_lines import last_words, read_log_line

_POLL_SECONDS = 0.1
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)

Report = Callable[[str], None]
"""Shows one message to the person who started it; does not fail, even when nobody is there any more."""


class Supervisor:
    """Owns the children from `start` to `stop`."""

    def __init__(self, specs: Sequence[ChildSpec], log_dir: Path, report: Report) -> None:
        self._report = report
        self.children = [Child(spec, log_dir / f"{spec.name}.log", self._on_line, report) for spec in specs]
        self._started: list[Child] = []
        self._is_stopping = False

    async def start(self, startup_seconds: float) -> None:
        """Returns when all are ready. Raises UnavailableError, naming who died or is not ready in time."""
        for child in self.children:
            self._started.append(child)
            await child.start()
        ready = asyncio.create_task(self._wait_all_ready())
        deaths = [asyncio.create_task(child.wait()) for child in self.children]
        try:
            done, _ = await asyncio.wait([ready, *deaths], timeout=startup_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(ready, *deaths)
        dead = [child for child in self.children if child.exit_code is not None]
        if dead:
            raise UnavailableError("\n".join(describe_death(child) for child in dead))
        if ready not in done:
            raise UnavailableError(f"the service is not ready after {startup_seconds:.0f} s; {self._whose_logs()}")

    async def watch(self) -> None:
        """Until the service cannot go on. Raises UnavailableError then; a death it survives is only reported."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._handle_death(waits.pop(task), {child.spec.role for child in waits.values()})
        finally:
            await _cancel(*waits)

    async def stop(self, grace_seconds: float) -> None:
        """Ends all of them together; safe to call at any time."""
        self._is_stopping = True
        await asyncio.gather(*(child.stop(grace_seconds) for child in self._started))

    def kill(self) -> None:
        for child in self._started:
            child.kill()

    def _handle_death(self, child: Child, roles_left: set[str]) -> None:
        message = describe_death(child)
        if child.spec.role == "proxy" or "decode" not in roles_left:
            raise UnavailableError(message)
        self._report(f"{message}\nThe service goes on without it.")

    async def _wait_all_ready(self) -> None:
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._wait_ready(child))

    async def _wait_ready(self, child: Child) -> None:
        async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session:
            while True:
                if await is_ready(session, child.spec.health_url):
                    return
                await asyncio.sleep(_POLL_SECONDS)

    def _on_line(self, name: str, line: str) -> None:
        """Warnings and errors of a process reach the person; all the rest is in its log file."""
        read = read_log_line(line)
        if not self._is_stopping and read.is_worth_a_look:
            self._report(f"[{name}] {read.text}")

    def _whose_logs(self) -> str:
        return "logs: " + ", ".join(str(child.log.path) for child in self.children)


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def describe_death(child: Child) -> str:
    """Who, how, its last words, and where all of them are."""
    code = child.exit_code
    assert code is not None
    how = f"exit status {code}" if code >= 0 else f"signal {_signal_name(-code)}"
    unnamed = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
    log = f"its whole log: {child.log.path}" if child.log.is_whole else f"the first part of its log: {child.log.path}"
    words = last_words(child.tail) or [f"(it named no cause{unnamed})"]
    return "\n    ".join([f"{child.spec.name} ended with {how}; {log}", *words])


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
