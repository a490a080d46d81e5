"""`tandem models`: what it lists, fetches and removes. The packages that hold models are not asked for."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from common.checkpoints.cache import build_once
from tandem import models
from tandem.cli import main

DIRECTORY = "tiny-0123456789ab-v1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tandem's, with one model of 3 MB; that of the Hub is empty."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "cache" / "models"
    build_once(folder / DIRECTORY, lambda partial: _write(partial / "model.safetensors"))
    return folder


def _write(path: Path) -> None:
    path.write_bytes(bytes(3_000_000))


def _hub_model(cache: Path) -> Path:
    """As huggingface_hub lays it out."""
    repository = cache.parents[1] / "hub" / "models--owner--name"
    blob = repository / "blobs" / "abc"
    snapshot = repository / "snapshots" / ("1" * 40)
    for folder in (blob.parent, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    blob.write_bytes(bytes(2_000_000))
    (snapshot / "model.safetensors").symlink_to(blob)
    (repository / "refs" / "main").write_text("1" * 40)
    return repository


def _rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in out.splitlines()[1:]}


@pytest.mark.parametrize("argv", [["models"], ["models", "list"]])
def test_list(argv: list[str], cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = _hub_model(cache)
    (cache / ".half-0123456789ab-v1.partial").mkdir()
    broken = build_once(cache / "broken-0123456789ab-v1", lambda partial: _write(partial / "weights"))
    (broken / "weights").write_bytes(b"cut")
    assert main(argv) == 0
    rows = _rows(capsys.readouterr().out)
    assert rows["tiny"] == ["tiny", "3", "MB", "ready", str(cache / DIRECTORY)]
    assert rows["half"][3] == "unfinished"
    assert rows["broken"][3] == "damaged"
    assert rows["owner/name"] == ["owner/name", "2", "MB", "ready", str(hub)]
    assert rows["smollm2-135m-instruct"][1:4] == ["-", "not", "here"]


def test_list_without_any_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "none"))
    assert main(["models"]) == 0
    assert list(_rows(capsys.readouterr().out)) == ["smollm2-135m-instruct"]


def test_pull_says_where_it_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "resolve_model", lambda name: cache / DIRECTORY)
    assert main(["models", "pull", "tiny"]) == 0
    assert capsys.readouterr().out == f"tiny is in {cache / DIRECTORY} (3 MB)\n"


def test_pull_of_nothing_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem models: model 'no-such-model' is neither an alias (smollm2-135m-instruct)")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["tiny", DIRECTORY])
def test_remove(name: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "remove", name, "--yes"]) == 0
    assert "removed, 3 MB are free again" in capsys.readouterr().out
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_remove_takes_what_a_killed_pull_left(cache: Path) -> None:
    (cache / ".half-0123456789ab-v1.partial" / "download").mkdir(parents=True)
    (cache / f".{DIRECTORY}.partial" / "download").mkdir(parents=True)
    assert main(["models", "remove", "half", "-y"]) == 0
    assert main(["models", "remove", "tiny", "-y"]) == 0
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_remove_from_the_hubs_cache(cache: Path) -> None:
    repository = _hub_model(cache)
    assert main(["models", "remove", "owner/name", "--yes"]) == 0
    assert not repository.exists()
    assert (cache / DIRECTORY).exists()


@pytest.mark.parametrize(
    ("answer", "is_kept"), [("y\n", False), ("YES\n", False), ("\n", True), ("n\n", True), ("", True)]
)
def test_remove_asks(answer: str, is_kept: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    person = io.StringIO(answer)
    monkeypatch.setattr(person, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", person)
    assert main(["models", "remove", "tiny"]) == int(is_kept)
    assert (cache / DIRECTORY).exists() == is_kept


def test_remove_refuses_when_nobody_can_be_asked_and_when_there_is_no_such_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["models", "remove", "tiny"]) == 1
    assert "nobody is here to say yes; give --yes" in capsys.readouterr().err
    assert main(["models", "remove", "tini", "--yes"]) == 1
    assert capsys.readouterr().err == "tandem models: no model 'tini' is in the cache, did you mean tiny?\n"
    assert (cache / DIRECTORY).exists()


@pytest.mark.parametrize("action", ["pull", "remove"])
def test_a_missing_name_is_asked_for_by_the_whole_command(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", action])
    assert capsys.readouterr().err.startswith(f"tandem models {action}: the following arguments are required: NAME")
