"""A command that is ended while it fetches a model leaves no process and, if it can, nothing half-fetched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.termination import termination_as_interrupt

NUM_SECONDS = 60


@contextmanager
def _fetching(tmp_path: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A command whose pip waits for an index that never answers, and the connection from there."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(NUM_SECONDS)
        environment = {name: value for name, value in os.environ.items() if not name.lower().startswith(("pip_", "ht"))}
        environment |= {
            "TANDEM_CACHE_DIR": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *command], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            connection, _ = index.accept()
            with connection:
                connection.settimeout(NUM_SECONDS)
                yield process, connection
        finally:
            process.kill()
            process.communicate()


def _wait_for_its_end(connection: socket.socket) -> None:
    """The other side's sockets are closed when it has ended. Raises TimeoutError while it lives."""
    while connection.recv(65536):
        pass


def _left(folder: Path) -> list[str]:
    return [path.name for path in (folder / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (("serve", "--port", "0"), 0, "tandem serve: stopped before anything was started"),
        (("models", "pull", "smollm2-135m-instruct"), 130, ""),
    ],
)
def test_a_signal_takes_back_what_is_half_fetched(
    tmp_path: Path, number: signal.Signals, command: tuple[str, ...], status: int, said: str
) -> None:
    with _fetching(tmp_path, *command) as (process, connection):
        assert _left(tmp_path)
        process.send_signal(number)
        _wait_for_its_end(connection)
        _, errors = process.communicate(timeout=NUM_SECONDS)
    assert process.returncode == status
    assert [line for line in errors.splitlines() if " info " not in line] == [said] * bool(said)
    assert _left(tmp_path) == []


def test_a_sigkill_leaves_no_pip(tmp_path: Path) -> None:
    with _fetching(tmp_path, "serve", "--port", "0") as (process, connection):
        process.kill()
        _wait_for_its_end(connection)


@pytest.fixture
def handle() -> Iterator[Callable[[signal.Signals, signal.Handlers], None]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield lambda number, handler: signal.signal(number, handler) and None
    for number, handler in before.items():
        signal.signal(number, handler)


def _be_ended() -> None:
    with termination_as_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did nothing")


def test_handlers_come_back_and_what_nohup_ignores_stays_ignored(
    handle: Callable[[signal.Signals, signal.Handlers], None],
) -> None:
    handle(signal.SIGTERM, signal.SIG_DFL)
    handle(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        _be_ended()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
