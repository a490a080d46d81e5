"""Flags and environment of every process, and how wrong ones are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from common.config import NodeFlags, parse, to_flags


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
        (["--proxy", "localhost:1"], "--proxy is localhost:1: 'localhost:1' is no endpoint, must look like tcp://"),
        (["--swap-space", "nonsense"], "--swap-space is 'nonsense': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "-1"], "--swap-space is '-1': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "1.5.2"], "--swap-space is '1.5.2': must be a size such as 512MiB or 4GiB"),
        (["--swap-space", "9" * 19], f"--swap-space is '{'9' * 19}': must be a size such as"),
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
        parse(NodeFlags, argv, prog="decode_node")
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"decode_node: {message}")
    assert error.count("\n") == 1


def test_a_wrong_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "9")
    with pytest.raises(SystemExit):
        parse(NodeFlags, [])
    assert "TANDEM_BLOCK_SIZE is 9: must be 8, 16 or 32" in capsys.readouterr().err


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
