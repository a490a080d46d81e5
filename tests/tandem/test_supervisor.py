"""The supervisor over scripted children: readiness, deaths, stops, and that nothing is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import UnavailableError
from tandem.child import ChildSpec
from tandem.supervisor import Supervisor

MakeSpec = Callable[..., ChildSpec]


@asynccontextmanager
async def supervising(specs: list[ChildSpec], log_dir: Path) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    reports: list[str] = []
    supervisor = Supervisor(specs, log_dir, reports.append)
    try:
        yield supervisor, reports
    finally:
        await supervisor.stop(5.0)
        assert all(child.exit_code is not None for child in supervisor.children if child._process is not None)


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_all_become_ready_and_stop_politely(child_spec: MakeSpec, log_dir: Path) -> None:
    specs = [child_spec("proxy", "proxy"), child_spec("prefill", "prefill"), child_spec("decode", "decode")]
    async with supervising(specs, log_dir) as (supervisor, _):
        await supervisor.start(30)
        await supervisor.stop(5.0)
        assert [child.exit_code for child in supervisor.children] == [0, 0, 0]


async def test_warnings_reach_the_person_and_all_lines_the_log(child_spec: MakeSpec, log_dir: Path) -> None:
    async with supervising([child_spec("decode", "decode")], log_dir) as (supervisor, reports):
        await supervisor.start(30)
        assert reports == ["[decode] 2026-01-01T00:00:00.000 warning child beware"]
        assert "info child started" in (log_dir / "decode.log").read_text()


async def test_warnings_in_json_reach_the_person_too_and_as_text(child_spec: MakeSpec, log_dir: Path) -> None:
    async with supervising([child_spec("decode", "decode", "json")], log_dir) as (supervisor, reports):
        await supervisor.start(30)
        assert reports[1:] == ["[decode] 2026-01-01T00:00:00.001 warning child odd n=3"]
        assert '{"time": "2026-01-01T00:00:00.001"' in (log_dir / "decode.log").read_text()


async def test_one_that_fails_to_start_is_named_with_its_last_words(child_spec: MakeSpec, log_dir: Path) -> None:
    specs = [child_spec("proxy", "proxy"), child_spec("decode", "decode", "fails")]
    async with supervising(specs, log_dir) as (supervisor, _):
        with pytest.raises(UnavailableError) as caught:
            await supervisor.start(30)
    log = log_dir / "decode.log"
    assert caught.value.message == f"decode ended with exit status 3; its whole log: {log}\n    cannot load the model"


async def test_a_log_that_cannot_be_written_is_told_and_not_called_whole(child_spec: MakeSpec, log_dir: Path) -> None:
    (log_dir / "decode.log").symlink_to("/dev/full")
    async with supervising([child_spec("decode", "decode", "fails")], log_dir) as (supervisor, reports):
        with pytest.raises(UnavailableError, match=r"exit status 3; the first part of its log: (.|\n)*load the model"):
            await supervisor.start(30)
        assert [report for report in reports if "cannot be written (No space left on device)" in report] == reports[:1]


async def test_one_that_never_gets_ready_ends_the_wait(child_spec: MakeSpec, log_dir: Path) -> None:
    async with supervising([child_spec("decode", "decode", "never")], log_dir) as (supervisor, _):
        with pytest.raises(UnavailableError, match=r"not ready after 1 s.*decode\.log"):
            await supervisor.start(0.6)


@pytest.mark.parametrize("victim", ["proxy", "decode"])
async def test_without_proxy_or_last_decode_node_nothing_goes_on(
    child_spec: MakeSpec, log_dir: Path, victim: str
) -> None:
    specs = [child_spec(role, role) for role in ("proxy", "prefill", "decode")]
    async with supervising(specs, log_dir) as (supervisor, _):
        await supervisor.start(30)
        next(child for child in supervisor.children if child.spec.name == victim).kill()
        with pytest.raises(UnavailableError, match=f"{victim} ended with signal SIGKILL(.|\n)*named no cause"):
            await supervisor.watch()


async def test_a_prefill_node_or_one_of_two_decode_nodes_may_go(child_spec: MakeSpec, log_dir: Path) -> None:
    specs = [child_spec("proxy", "proxy"), child_spec("prefill", "prefill")]
    specs += [child_spec(f"decode-{i}", "decode") for i in range(2)]
    async with supervising(specs, log_dir) as (supervisor, reports):
        await supervisor.start(30)
        watch = asyncio.create_task(supervisor.watch())
        for index, name in ((1, "prefill"), (2, "decode-0")):
            supervisor.children[index].kill()
            async with asyncio.timeout(10):
                await supervisor.children[index].wait()
                await until(lambda name=name: f"{name} ended with signal SIGKILL" in "".join(reports))
        assert not watch.done()
        supervisor.children[3].kill()
        with pytest.raises(UnavailableError, match="decode-1 ended"):
            await watch


async def test_one_that_ignores_sigterm_is_killed(child_spec: MakeSpec, log_dir: Path) -> None:
    async with supervising([child_spec("decode", "decode", "stubborn")], log_dir) as (supervisor, _):
        await supervisor.start(30)
        start = time.monotonic()
        await supervisor.stop(0.1)
        assert time.monotonic() - start < 8
        assert supervisor.children[0].exit_code == -signal.SIGKILL


async def test_a_second_stop_and_a_stop_before_start_do_nothing(child_spec: MakeSpec, log_dir: Path) -> None:
    async with supervising([child_spec("decode", "decode")], log_dir) as (supervisor, _):
        await supervisor.stop(1.0)
        await supervisor.start(30)
        await supervisor.stop(1.0)
        await supervisor.stop(1.0)


def test_sigkill_of_the_supervisor_leaves_no_child(child_spec: MakeSpec, log_dir: Path) -> None:
    spec = child_spec("decode", "decode", "stubborn")
    script = textwrap.dedent(
        """
        import asyncio, pathlib, sys
        from tandem.child import ChildSpec
        from tandem.supervisor import Supervisor
        async def main():
            supervisor = Supervisor([ChildSpec("decode", "decode", sys.argv[3:], sys.argv[2])],
                                    pathlib.Path(sys.argv[1]), lambda _: None)
            await supervisor.start(30)
            print(supervisor.children[0].pid, flush=True)
            await supervisor.watch()
        asyncio.run(main())
        """
    )
    command = [sys.executable, "-c", script, str(log_dir), spec.health_url, *spec.command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        os.sched_yield()
