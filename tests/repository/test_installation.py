"""The wheel in a clean environment: a proxy runs without torch, and what needs it says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""With PYTHONPATH set pip would find the checkout, and install nothing."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with the wheel and its extra `proxy`."""
    folder = tmp_path_factory.mktemp("clean")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    [wheel] = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", f"{wheel}[proxy]"],
        check=True,
        env=CLEAN,
        timeout=600,
    )
    return python.parent


def run(environment: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(environment / command[0]), *command[1:]],
        cwd=environment,
        env=CLEAN,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_torch_is_not_there_and_who_needs_it_says_so(environment: Path) -> None:
    assert "torch" not in run(environment, "python", "-m", "pip", "freeze").stdout
    node = run(environment, "tandem", "decode")
    assert node.returncode == 1
    assert "pip install 'tandem-serve[engine]'" in node.stderr
    program = run(environment, "python", "-c", "from tandem import LLM")
    assert "ImportError: torch" in program.stderr
    assert "pip install 'tandem-serve[engine]'" in program.stderr


def test_the_command_line_works(environment: Path) -> None:
    for arguments in (["--help"], ["proxy", "--help"], ["--version"], ["models"]):
        assert run(environment, "tandem", *arguments).returncode == 0, arguments


def test_a_proxy_serves(environment: Path) -> None:
    command = [str(environment / "tandem"), "proxy", "--port", "0", "--control-endpoint", "tcp://127.0.0.1:0"]
    # PATH only: nothing of the checkout may be found
    clean = {"PATH": "/usr/bin:/bin", **_home()}
    with subprocess.Popen(command, cwd=environment, stderr=subprocess.PIPE, text=True, env=clean) as process:
        try:
            assert process.stderr is not None
            url = next(line.split("url=")[1].split()[0] for line in process.stderr if "url=" in line)
            with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
                assert json.load(reply) == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def _home() -> dict[str, str]:
    return {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
