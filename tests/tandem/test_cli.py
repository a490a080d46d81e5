"""The `tandem` command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli import main
from tests.tandem.scripted_endpoint import running_endpoint


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


OUTPUTS = [
    ("config",),
    ("config", "decode"),
    ("status", "--url"),
    ("models",),
    ("env",),
    ("keygen",),
    ("completion", "bash"),
    ("--help",),
    ("--version",),
]


@pytest.fixture(scope="module")
def proxy_url() -> Iterator[str]:
    with running_endpoint() as endpoint:
        endpoint.pages["/nodes"] = b'{"nodes": [], "num_queued": 0, "model": "tiny", "is_ready": false}'
        yield endpoint.url


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_what_nobody_reads_is_none(
    command: tuple[str, ...], proxy_url: str, tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "tandem", *command, *([proxy_url] if command[0] == "status" else [])]
    environment = {**os.environ, "TANDEM_CACHE_DIR": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)  # a failure may come only with the last of the output
    with open("/dev/full", "w") as full:
        failed = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert failed.stderr == f"tandem {command[0]}: cannot write to standard output: No space left on device\n"
    assert failed.returncode == 1
    gone, stream = os.pipe()
    os.close(gone)
    with open(stream, "w") as closed:
        unread = subprocess.run(run, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (unread.returncode, unread.stderr) == (0, "")


def test_a_watched_status_that_nobody_reads_any_more_ends_well(proxy_url: str) -> None:
    command = [sys.executable, "-m", "tandem", "status", "--url", proxy_url, "--watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "tiny" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_a_full_disk_elsewhere_is_not_called_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr("tandem.keygen.main", fail)
    with pytest.raises(OSError, match="some/file"):
        main(["keygen"])


def test_a_name_that_the_output_cannot_encode_is_escaped(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/models/\xff-0123456789ab-v1"
    os.makedirs(folder)
    run = [sys.executable, "-m", "tandem", "models"]
    environment = {**os.environ, "TANDEM_CACHE_DIR": str(tmp_path), "PYTHONIOENCODING": "ascii:strict"}
    listed = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
    assert "\\udcff  " in listed.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["keygen", "a", "b"], "tandem keygen: argument 'b' is not expected (see --help)"),
        (["keygen", "--lenght", "3"], "tandem keygen: unknown flag --lenght (see --help)"),
        (
            ["status", "--interval", "x"],
            "tandem status: argument --interval: is 'x', must be a number of seconds from 0.1 to 3600 (see --help)",
        ),
        (
            ["status", "--interval", "nan"],
            "tandem status: argument --interval: is 'nan', must be a number of seconds from 0.1 to 3600 (see --help)",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
