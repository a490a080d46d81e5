"""What README and the first pages of the docs show, run as it is written (but for the port)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


PROGRAMS = [
    pytest.param(
        document,
        number,
        id=f"{document}-{number}",
        marks=[] if document == "README.md" else [pytest.mark.slow],  # each loads the model
    )
    for document in ("README.md", "docs/getting-started.md")
    for number in range(len(blocks(document, "python")))
]


@pytest.mark.parametrize(("document", "number"), PROGRAMS)
def test_programs_run(split: Any, document: str, number: int) -> None:
    program = blocks(document, "python")[number].replace("http://127.0.0.1:8000", split.service.url)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"TANDEM_NUM_GPU_BLOCKS_OVERRIDE": "200", "TANDEM_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_curl_command_streams_an_answer(split: Any) -> None:
    [session] = blocks("README.md", "console")
    command = session.split("$ ", 1)[1].split("\ndata:", 1)[0].replace("http://127.0.0.1:8000", split.service.url)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=100)
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0].startswith('data: {"id":"chatcmpl-')
    assert lines[-1] == "data: [DONE]"
