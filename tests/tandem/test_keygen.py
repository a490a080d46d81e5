"""`tandem keygen`: a secret that is accepted, readable by its owner only, never written over another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.cluster_secret import ClusterSecret, load_cluster_secret
from tandem.cli import main


@pytest.fixture
def _umask() -> object:
    before = os.umask(0)  # the worst case
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_a_file_for_its_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    assert main(["keygen", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    load_cluster_secret(path)
    said = capsys.readouterr()
    assert path.read_text().strip() not in said.out + said.err
    assert f"--cluster-secret-file {path}" in said.err
    assert not caplog.records


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen"]) == main(["keygen"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first != second
    ClusterSecret(first)


def test_no_secret_looks_like_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([f"-{'a' * 42}", f"--{'b' * 41}", f"c-{'d' * 41}"])
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: next(made))
    assert main(["keygen"]) == 0
    assert capsys.readouterr().out.startswith("c-d")


def test_an_existing_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret"
    path.write_text("precious")
    assert main(["keygen", str(path)]) == 1
    assert path.read_text() == "precious"
    assert f"{path} exists already" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "none" / "secret")]) == 1
    assert "none/secret: No such file or directory" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert main(["keygen", str(tmp_path / "secret")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
