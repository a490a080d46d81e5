"""`tandem completion`: what a shell is told at a Tab."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tandem.cli import main


def _completions(line: str) -> set[str]:
    """Over the file descriptor and with the variables of argcomplete's scripts."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    command = 'exec "$0" -m tandem 8>&1 9>/dev/null >/dev/null'
    result = subprocess.run(
        ["bash", "-c", command, sys.executable], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    return {word.strip() for word in result.stdout.split("\n") if word.strip()}


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("tandem mod", {"models"}),
        ("tandem models r", {"remove"}),
        ("tandem serve --scheduling", {"--scheduling-policy"}),
        ("tandem decode --scheduling-policy ", {"priority", "fcfs"}),
        ("tandem config pro", {"proxy"}),
        ("tandem completion z", {"zsh"}),
        ("tandem chat --no-such", set()),
    ],
)
def test_commands_flags_and_choices_are_completed(line: str, completions: set[str]) -> None:
    assert _completions(line) == completions


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete "), ("zsh", "#compdef tandem"), ("fish", "complete --command tandem")]
)
def test_each_shell_gets_its_script(shell: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert words in capsys.readouterr().out


def test_bash_takes_the_script(tmp_path: object) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "tandem", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    result = subprocess.run(["bash", "-c", f"{script}\ncomplete -p tandem"], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("tandem")
