"""Flags and environment of every process, and how wrong ones are refused."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from common.command_line import kinds_of
from common.config import Flags, NodeFlags, parse, to_flags
from common.config_file import PROCESSES, config_class_of
from common.config_variables import QUIET, known_variables, warn_of_unknown_variables
from common.offline.flags import OfflineFlags

ROOT = Path(__file__).parents[2]


def test_defaults() -> None:
    config = parse(NodeFlags, [])
    assert config.model == config.public_model_name == "smollm2-135m-instruct"
    assert config.proxy == ("tcp://127.0.0.1:8100",)
    assert (config.block_size, config.dtype, config.port) == (16, "float32", 0)
    assert config.enable_prefix_caching


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "32")
    monkeypatch.setenv("TANDEM_PORT", "9000")
    monkeypatch.setenv("TANDEM_PROXY", "tcp://a:1, ipc:///b")
    monkeypatch.setenv("TANDEM_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("TANDEM_MAX_NUM_SEQS", "")
    config = parse(NodeFlags, ["--block-size", "8"])
    assert (config.block_size, config.port, config.proxy) == (8, 9000, ("tcp://a:1", "ipc:///b"))
    assert not config.enable_prefix_caching
    assert config.max_num_seqs == 64


def test_the_model_may_stand_first() -> None:
    assert parse(NodeFlags, ["some/dir", "--port", "1"]).model == "some/dir"
    assert parse(NodeFlags, ["--model", "some/dir"]).model == "some/dir"


def test_values_people_write() -> None:
    argv = ["--proxy", "tcp://a:1,tcp://b:2", "--proxy", "ipc:///c", "--kv-cache-memory-bytes", "1.5GiB"]
    config = parse(NodeFlags, argv)
    assert config.proxy == ("tcp://a:1", "tcp://b:2", "ipc:///c")
    assert config.kv_cache_memory_bytes == 3 * 2**29


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse(NodeFlags, []).port = 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--blocksize", "8"], "unknown flag --blocksize, did you mean --block-size?"),
        (["--block", "8"], "unknown flag --block"),
        (["--block-size", "12"], "argument --block-size: invalid choice: '12' (choose from"),
        (["--port", "99999"], "--port is '99999': must be less than or equal to 65535"),
        (["--max-num-seqs", "many"], "--max-num-seqs is 'many': must be a valid integer"),
        (["--proxy", "tcp://a:1,tcp://a:0"], "'tcp://a:0' has the port '0', must be a number from 1 to 65535"),
        (["--proxy", ","], "--proxy is ,: must name at least one endpoint"),
        (["--fetch-host", "nohost"], "--fetch-host is 'nohost': 'nohost' is no address to listen at"),
        (["--host", ""], "--host is '': must not be empty"),
        (["--cluster-secret-file", ""], "--cluster-secret-file is '': must not be empty"),
        (["--log-level", "=debug"], "--log-level is '=debug': has the package ''"),
        (["--proxy", "localhost:1"], "--proxy is localhost:1: 'localhost:1' is no endpoint, must look like tcp://"),
        (["--swap-space", "nonsense"], "--swap-space is 'nonsense': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "-1"], "--swap-space is '-1': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "1.5.2"], "--swap-space is '1.5.2': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "9" * 19], f"--swap-space is '{'9' * 19}': must be a size such as"),
        (["--swap-space", "9" * 18], "must be at most 1024TiB"),
        (["--kv-cache-memory-bytes", "1e9"], "--kv-cache-memory-bytes is '1e9': must be a size such as"),
        (["--kv-cache-memory-bytes", "2XB"], "--kv-cache-memory-bytes is '2XB': must be a size such as 512MiB or 4GiB"),
        (["a", "--model", "b"], "'a' and --model are both given"),
        (["a", "b"], "argument 'b' is not expected"),
        (["--model"], "argument --model: expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_clear_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(NodeFlags, argv, prog="tandem decode")
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem decode: ")
    assert message in error
    assert error.count("\n") == 1


CONFIG_CLASSES = [*map(config_class_of, PROCESSES), OfflineFlags]


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_every_number_has_a_limit_that_the_refusal_names(config_class: type[Flags]) -> None:
    """What is too large would fail later, somewhere: after the model was loaded, or as a wait that never ends."""
    numbers = {name: kinds_of(field.annotation) & {int, float, ByteSize} for name, field in fields(config_class)}
    assert sum(map(bool, numbers.values())) >= 10
    for name in (name for name, kinds in numbers.items() if kinds):
        for value in ("9" * 26, "inf", "nan", 10**26, -(10**26), math.inf, math.nan, True):
            with pytest.raises(ValidationError, match=NAMES_WHAT_IS_ALLOWED):
                config_class(**{name: value})


NAMES_WHAT_IS_ALLOWED = r"less than|greater than|size such as|1024TiB|must be a|valid (integer|number)|8, 16 or 32"


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_text_that_is_no_name_is_refused(config_class: type[Flags]) -> None:
    texts = [name for name, field in fields(config_class) if kinds_of(field.annotation) & {str, Path}]
    assert "log_level" in texts
    for name in texts:
        for value in ("", "a\0b"):
            with pytest.raises(ValidationError, match=f"{name}\n"):
                config_class(**{name: value})


@pytest.mark.parametrize(
    ("process", "flag", "value", "message"),
    [
        ("prefill", "--fetch-advertise", "foo", "'foo' is no endpoint"),
        ("prefill", "--fetch-advertise", "tcp://127.0.0.1:0", "has the port '0'"),
        ("prefill", "--fetch-advertise", "", "must not be empty"),
        ("proxy", "--control-endpoint", "tcp://127.0.0.1:99999", "has the port '99999', must be a number from 0 to"),
        ("proxy", "--control-endpoint", "tcp://nohost:1", "'nohost' is no address to listen at"),
        ("serve", "--control-endpoint", "tcp://127.0.0.1:99999", "has the port '99999', must be a number from 1 to"),
        ("serve", "--control-endpoint", "tcp://127.0.0.1:0", "has the port '0'"),
        ("serve", "--control-endpoint", "tcp://nohost:1", "'nohost' is no address to listen at"),
    ],
)
def test_endpoints_are_checked_before_anything_is_started(
    process: str, flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config_class = config_class_of(process)
    assert issubclass(config_class, Flags)
    with pytest.raises(SystemExit):
        parse(config_class, [flag, value])
    error = capsys.readouterr().err
    assert f"{flag} is {value!r}: " in error
    assert message in error


def fields(config_class: type[Flags]) -> list[tuple[str, FieldInfo]]:
    return list(config_class.model_fields.items())


def test_numbers_are_not_bent_until_they_fit() -> None:
    for name, value in {"max_num_seqs": True, "block_size": 16.0, "port": 80.0, "cpu_memory_utilization": True}.items():
        with pytest.raises(ValidationError, match=r"must be (a number|an integer)"):
            NodeFlags(**{name: value})
    assert NodeFlags(swap_space=1.5, cpu_memory_utilization=1).swap_space == 3 * 2**29


def test_a_wrong_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "9")
    with pytest.raises(SystemExit):
        parse(NodeFlags, [])
    assert "TANDEM_BLOCK_SIZE is 9: must be 8, 16 or 32" in capsys.readouterr().err


# --- variables that mean nothing ------------------------------------------------------------------------------------


@pytest.fixture
def warn(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Sets these variables; what is said of them."""

    def warn(*classes: type[Flags], **variables: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            caplog.clear()
            warn_of_unknown_variables(*classes)
        return [record.getMessage() for record in caplog.records]

    return warn


def test_a_mistyped_variable_is_named_with_the_nearest_in_one_line(warn: Callable[..., list[str]]) -> None:
    said = "set in the environment, but nothing reads it: "
    assert warn(TANDEM_MAX_NUM_SEQ="value") == [f"{said}TANDEM_MAX_NUM_SEQ, did you mean TANDEM_MAX_NUM_SEQS?"]
    assert warn(TANDEM_ZZZ="1", TANDEM_DRAIN_SECOND="2", TANDEMX="3", TANDEM_PORT="4") == [
        f"{said}TANDEM_DRAIN_SECOND, did you mean TANDEM_DRAIN_SECONDS?; TANDEM_ZZZ"
    ]


def test_known_and_empty_variables_are_not_spoken_of(warn: Callable[..., list[str]]) -> None:
    assert not warn()
    known = ("PORT", "API_KEY", "CONFIG", "CACHE_DIR", "MODELS_DIR", "TORCH_INDEX", "max_queue", "PREFILL")
    assert not warn(**{f"TANDEM_{name}": "1" for name in known}, TANDEM_NOPE="")
    assert warn(TANDEM_SEED="1")
    assert not warn(OfflineFlags, TANDEM_SEED="1")


def test_a_process_whose_parent_has_said_it_says_nothing(warn: Callable[..., list[str]]) -> None:
    assert not warn(**QUIET, TANDEM_NOPE="1")


def test_every_variable_that_our_files_name_is_known() -> None:
    files = [*ROOT.glob("compose*.yaml"), ROOT / "Dockerfile", ROOT / "Makefile", *ROOT.glob("deploy/*.*")]
    named = {name for path in files for name in re.findall(r"\bTANDEM_[A-Z_]+[A-Z]\b", path.read_text())}
    assert {"TANDEM_TORCH_INDEX", "TANDEM_MODELS_DIR", "TANDEM_ENGINE_DIR"} <= named
    assert named <= known_variables()


def test_every_process_says_it_once_and_goes_on(tmp_path: Path) -> None:
    """They end at the model, which is not there."""
    environment = {**os.environ, "TANDEM_MAX_NUM_SEQ": "3", "TANDEM_CACHE_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tandem", *argv]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)

    for command in ("serve", "proxy", "decode"):
        result = run(command, str(tmp_path / "none"), "--log-format", "json")
        assert result.returncode == 1
        [warning] = [line for line in result.stderr.splitlines() if "TANDEM_MAX_NUM_SEQ," in line]
        assert json.loads(warning)["level"] == "warning"
        last = result.stderr.splitlines()[-1]
        if command == "serve":  # speaks to a person
            assert last.startswith("tandem serve: ")
        else:
            assert json.loads(last)["level"] == "error"
            assert "is neither an alias" in json.loads(last)["message"]
    shown = run("config", "decode")
    assert shown.returncode == 0
    assert shown.stderr.count("TANDEM_MAX_NUM_SEQS?") == 1


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(NodeFlags, ["--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for name in NodeFlags.model_fields:
        assert "--" + name.replace("_", "-") in out
    assert "(default: tcp://127.0.0.1:8100)" in " ".join(out.split())


def test_to_flags_repeats_what_was_given_and_nothing_else() -> None:
    argv = ["m", "--block-size", "8", "--no-enable-prefix-caching", "--proxy", "tcp://a:1,tcp://b:2"]
    config = parse(NodeFlags, argv)
    assert parse(NodeFlags, to_flags(config, NodeFlags.model_fields)) == config
    assert to_flags(config, {"block_size", "max_num_seqs"}) == ["--block-size", "8"]
