"""`tandem serve` with the real model, as the README tells it: the commands printed there are run as they stand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README_URL = "http://127.0.0.1:8000"

pytestmark = pytest.mark.e2e


@dataclass
class Served:
    process: subprocess.Popen[str]
    message: str

    @property
    def url(self) -> str:
        return re.search(r"at (http://\S+)/v1", self.message)[1]  # type: ignore[index]

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]


@pytest.fixture(scope="module")
def start_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Served]]:
    processes: list[subprocess.Popen[str]] = []

    def start() -> Served:
        log_dir = tmp_path_factory.mktemp("serve")
        command = [
            sys.executable,
            "-m",
            "tandem",
            "serve",
            "--port",
            "0",
            "--num-threads",
            "1",
            "--log-dir",
            str(log_dir),
        ]
        # a small pool: the machine may run other things
        command += ["--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Stop: Ctrl-C" in line:
                return Served(process, "".join(lines))
        assert process.stderr is not None
        raise AssertionError(process.stderr.read())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served(start_serve: Callable[[], Served]) -> Served:
    return start_serve()


def run_shell(command: str) -> str:
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    return result.stdout


def streamed_text(events: str) -> str:
    data = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(text) for text in data[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_the_curl_line_it_prints_streams_an_answer(served: Served) -> None:
    command = served.message[served.message.index("curl") : served.message.index("\n\nAnother node")]
    assert streamed_text(run_shell(command.replace('"stream"', '"temperature": 0, "stream"')))


def test_the_readme_curl_line_gives_the_answer_shown_there(served: Served) -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"^\$ (curl -N .*?)^data:", readme, re.MULTILINE | re.DOTALL)
    assert command is not None
    shown = re.findall(r'"delta":\{"content":"(.*?)"\}', readme)
    assert shown
    assert streamed_text(run_shell(command[1].replace(README_URL, served.url))).startswith("".join(shown))


def test_the_readme_sdk_example_prints_an_answer(served: Served) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    result = subprocess.run(
        [sys.executable, "-c", code[1].replace(README_URL, served.url)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_a_prefill_node_that_dies_is_lived_without_and_the_last_decode_node_is_not(
    start_serve: Callable[[], Served],
) -> None:
    served = start_serve()
    by_role = {Path(f"/proc/{pid}/cmdline").read_text().split("\0")[3]: pid for pid in served.children()}
    assert set(by_role) == {"proxy", "prefill", "decode"}
    os.kill(by_role["prefill"], signal.SIGKILL)
    body = json.dumps({"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 2})
    answer = run_shell(f"curl -s {served.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    assert json.loads(answer)["usage"]["completion_tokens"] > 0
    os.kill(by_role["decode"], signal.SIGKILL)
    _, errors = served.process.communicate(timeout=30)
    assert served.process.returncode == 1
    assert "prefill ended with signal SIGKILL" in errors
    assert "The service goes on without it." in errors
    assert "tandem serve: decode ended with signal SIGKILL" in errors
    assert not Path(f"/proc/{by_role['proxy']}").exists()


def test_ctrl_c_ends_everything_within_seconds(start_serve: Callable[[], Served]) -> None:
    served = start_serve()
    children = served.children()
    assert len(children) == 3
    begin = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    _, errors = served.process.communicate(timeout=30)
    assert served.process.returncode == 0, errors
    assert time.monotonic() - begin < 5
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
