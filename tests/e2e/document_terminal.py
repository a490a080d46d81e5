"""A terminal for the documents' commands: a folder, the environment of a user, and what was started there.

A command that serves is started, waited for by what it says when it is ready, and stopped by a signal; any other is run
to its end. Every one must end well. Knows nothing of documents.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.e2e.document_commands import on_ports

READY_SECONDS = 180.0


@dataclass(frozen=True)
class Kind:
    """How a command that goes on until it is stopped is handled."""

    ready: str
    answers: bool = False  # a whole service: it is asked once it is ready
    stays: bool = False  # a part of a service: it goes on until the block's end
    stop: signal.Signals = signal.SIGTERM
    status: tuple[int, ...] = (0,)


KINDS = {
    "tandem serve": Kind("Stop: Ctrl-C", answers=True),
    "make serve": Kind("Stop: Ctrl-C", answers=True, status=(0, 2, -signal.SIGTERM)),  # make's own way to end
    "tandem proxy": Kind("http_listening", stays=True),
    "tandem prefill": Kind("joined proxy", stays=True),
    "tandem decode": Kind("joined proxy", stays=True),
    "tandem status --watch": Kind("decode", stop=signal.SIGINT, status=(0, 130)),
}


def kind_of(command: str) -> Kind | None:
    return next((kind for start, kind in KINDS.items() if f"{command} ".startswith(f"{start} ")), None)


@dataclass
class Started:
    command: str
    kind: Kind
    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while self.kind.ready not in self.text():
            assert self.process.poll() is None, f"{self.command} ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"{self.command} never said {self.kind.ready!r}:\n{self.text()}"
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(self.kind.stop)
        status = self.process.wait(90)
        assert status in self.kind.status, f"{self.command} ended with {status}:\n{self.text()}"
        with pytest.raises(ProcessLookupError):  # nothing of it goes on
            os.killpg(self.process.pid, 0)


@dataclass
class Terminal:
    """A context manager; whatever is still running at its end is killed."""

    folder: Path
    ports: dict[str, int]
    replaced: dict[str, str] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    source: Path = Path(__file__).resolve().parents[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for started in self.started:
            with suppress(ProcessLookupError):
                os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['8000']}"

    def environment(self) -> dict[str, str]:
        """A user's, with the installation on PATH, and pools and threads that leave room for other tests."""
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("TANDEM_", "MAKE", "MFLAGS"))}
        ours |= {"PATH": f"{Path(sys.executable).parent}:{ours['PATH']}", "PYTHONPATH": str(self.source)}
        ours |= {"OMP_NUM_THREADS": "1", "TANDEM_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}
        ours |= {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # what is here must do
        return ours | {"TANDEM_MAX_MODEL_LEN": "2048", "TANDEM_NUM_GPU_BLOCKS_OVERRIDE": "200"}

    def run(self, command: str, given: str = "") -> str:
        """What it prints; AssertionError where it fails. Of a command that stays: nothing yet."""
        command = self._mechanically_changed(command)
        if kind := kind_of(command):
            return self._start(command, kind)
        return self._run_to_end(["bash", "-c", command], given)

    def run_python(self, program: str) -> str:
        return self._run_to_end([sys.executable, "-c", self._mechanically_changed(program)], "")

    def ask(self) -> None:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        assert "Paris" in reply.json()["choices"][0]["text"]

    def close_service(self) -> None:
        """The end of a block: the parts that were started in it are a service that answers and stops in order."""
        staying = [started for started in self.started if started.kind.stays]
        for started in staying:
            started.wait_ready()
        if staying:
            self.ask()
        for started in reversed(staying):
            started.stop()

    def _mechanically_changed(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return on_ports(text, self.ports)

    def _run_to_end(self, command: list[str], given: str) -> str:
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{command[-1]}\nended with {result.returncode}:\n{output}"
        return output

    def _start(self, command: str, kind: Kind) -> str:
        output = self.folder / f"output-{len(self.started)}.txt"
        with output.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(started := Started(command, kind, process, output))
        if kind.stays:
            return ""
        started.wait_ready()
        if kind.answers:
            self.ask()
        started.stop()
        return started.text()
