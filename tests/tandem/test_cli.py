"""The `tandem` command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.cli import main


def test_an_unknown_command_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "unknown command 'sevre', must be one of serve" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "proxy", "prefill", "decode"])
def test_each_process_explains_its_flags_and_refuses_wrong_ones(command: str) -> None:
    run = [sys.executable, "-m", "tandem", command]
    explained = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True)
    assert "--served-model-name" in explained.stdout
    refused = subprocess.run([*run, "--prot", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "unknown flag --prot, did you mean --port?" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
