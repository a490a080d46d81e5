"""A child's output is read to its end whatever happens to the log, the listener or the pipe; and it always stops."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tandem.child import Child, ChildSpec

NUM_LINES = 4000  # far more than a pipe holds
TALKS = f"for i in range({NUM_LINES}): print(i, 'x' * 90, flush=True)"
FULL = Path("/dev/full")


def _spec(code: str, *argv: str) -> ChildSpec:
    return ChildSpec("decode", "decode", [sys.executable, "-c", code, *argv], "http://127.0.0.1:1")


@pytest.mark.parametrize("case", ["full", "folder"])
async def test_a_log_that_cannot_be_written_is_told_once_and_the_child_goes_on(tmp_path: Path, case: str) -> None:
    heard: list[str] = []
    reports: list[str] = []
    path = FULL if case == "full" else tmp_path
    child = Child(_spec(TALKS), path, lambda _, line: heard.append(line), reports.append)
    await child.start()
    async with asyncio.timeout(60):
        assert await child.wait() == 0
    await child.stop(1.0)
    assert len(heard) == NUM_LINES
    reason = {"full": "No space left on device", "folder": "Is a directory"}[case]
    assert reports == [
        f"[decode] its log {path} cannot be written ({reason}); decode goes on, what it says from now on is not kept"
    ]
    assert not child.log.is_whole


async def test_a_log_keeps_every_line_even_those_that_a_listener_fails_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, line: str) -> None:
        raise BrokenPipeError(name, line)

    child = Child(_spec(TALKS), tmp_path / "log", fail, pytest.fail)
    await child.start()
    async with asyncio.timeout(60):
        assert await child.wait() == 0
    await child.stop(1.0)
    assert len((tmp_path / "log").read_bytes().splitlines()) == NUM_LINES
    assert len(child.tail) == child.tail.maxlen
    assert {record.message for record in caplog.records} == {"a line of decode was not shown"}


async def test_a_grandchild_that_keeps_the_pipe_open_delays_neither_a_death_nor_a_stop(tmp_path: Path) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "sys.exit(5)\n"
    )
    child = Child(_spec(code), tmp_path / "log", lambda _, line: heard.put_nowait(line), pytest.fail)
    await child.start()
    async with asyncio.timeout(60):
        grandchild = int(await heard.get())
        try:
            assert await child.wait() == 5
            await child.stop(1.0)
            os.kill(grandchild, 0)  # it is there still
        finally:
            os.kill(grandchild, signal.SIGKILL)
