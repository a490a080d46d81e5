"""The file of --config: what it says to which process, and how what is wrong in it is refused; `tandem config`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.command_line import Resolved, read_config
from common.config import NodeFlags, parse
from common.config_file import PROCESSES, config_class_of
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from proxy.config import ProxyConfig
from tandem.cli import main
from tandem.config import ServeConfig

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of this text; its path."""

    def write(text: str) -> str:
        path = tmp_path / "tandem.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


ALL_PROCESSES = """\
model: some/model
max-num-seqs: 32          # - is _
port: 0
max_queue: 7              # the proxy's alone
proxy: [tcp://a:1, tcp://b:2]
decode:
  max_num_seqs: 64
  lease_seconds: 3
prefill: {port: 9000}
serve: {decode: 2, drain_seconds: 0.5}
"""


def test_each_process_takes_its_section_over_the_top_level(write: Write) -> None:
    argv = ["--config", write(ALL_PROCESSES)]
    prefill, decode = parse(PrefillConfig, argv), parse(DecodeConfig, argv)
    assert (prefill.max_num_seqs, prefill.lease_seconds, prefill.port) == (32, 10, 9000)
    assert (decode.max_num_seqs, decode.lease_seconds, decode.model) == (64, 3, "some/model")
    assert decode.proxy == ("tcp://a:1", "tcp://b:2")
    assert parse(ProxyConfig, argv).max_queue == 7
    serve = parse(ServeConfig, argv)
    assert (serve.decode, serve.prefill, serve.drain_seconds, serve.max_num_seqs) == (2, 1, 0.5, 32)


def test_flag_environment_file_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("port: 1\nblock_size: 32\nmax_num_seqs: 3\ndecode: {block_size: 8, max_num_seqs: 4}\n")
    monkeypatch.setenv("TANDEM_PORT", "2")
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "16")
    resolved = read_config(DecodeConfig, ["--config", path, "--port", "3"])
    config = resolved.config
    assert (config.port, config.block_size, config.max_num_seqs, config.num_threads) == (3, 16, 4, 0)
    origins = [str(resolved.origin(name)) for name in ("port", "block_size", "max_num_seqs", "num_threads")]
    assert origins == ["--port", "TANDEM_BLOCK_SIZE", f"{path}:4", "default"]


def test_the_file_may_be_named_in_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CONFIG", write("max_num_seqs: 5"))
    assert parse(NodeFlags, []).max_num_seqs == 5
    monkeypatch.setenv("TANDEM_CONFIG", "")
    assert parse(NodeFlags, []).max_num_seqs == 64


def test_values_mean_what_they_mean_behind_a_flag(write: Write) -> None:
    text = """\
served_model_name: 0123
enable_prefix_caching: off
swap_space: 2
kv_cache_memory_bytes: 1.5GiB
max_model_len: null
max_num_seqs: ~
proxy: tcp://a:1,tcp://b:2
decode: {record_steps: steps.jsonl}
"""
    config = parse(DecodeConfig, ["--config", write(text)])
    assert config.served_model_name == "0123"
    assert config.enable_prefix_caching is False
    assert config.swap_space == 2**31
    assert config.kv_cache_memory_bytes == 3 * 2**29
    assert (config.max_model_len, config.max_num_seqs) == (None, 64)
    assert config.proxy == ("tcp://a:1", "tcp://b:2")
    assert config.record_steps == Path("steps.jsonl")


_OF_PORT = "`proxy: {port: 9000}` or `prefill: {port: 9000}` or `decode: {port: 9000}`"


@pytest.mark.parametrize(
    ("text", "config_class", "sections"),
    [
        ("port: 9000", DecodeConfig, _OF_PORT),
        ("port: 9000", PrefillConfig, _OF_PORT),
        ("fetch-port: 7", PrefillConfig, "`prefill: {fetch_port: 7}` or `decode: {fetch_port: 7}`"),
        ("record_steps: a", DecodeConfig, "`prefill: {record_steps: a}` or `decode: {record_steps: a}`"),
    ],
)
def test_what_only_one_process_can_have_is_refused_at_the_top_with_its_section(
    write: Write, text: str, config_class: type[NodeFlags], sections: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(f"max_num_seqs: 3\n{text}\n")
    with pytest.raises(SystemExit) as exit_info:
        parse(config_class, ["--config", path], prog="tandem decode")
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem decode: {path}:2: {text.split(':')[0].replace('-', '_')} stands at the top")
    assert f"write {sections} (see" in error


def test_the_port_at_the_top_is_that_of_the_api(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--config", write("port: 9000\nfetch_port: 0\nprefill: {port: 9001}")]
    assert parse(ServeConfig, argv).port == parse(ProxyConfig, argv).port == 9000
    assert parse(PrefillConfig, argv).port == 9001
    assert parse(DecodeConfig, [*argv, "--port", "9002"]).port == 9002, "as `tandem serve` starts one"
    monkeypatch.setenv("TANDEM_PORT", "9003")
    assert parse(DecodeConfig, argv).port == 9003


def test_an_empty_file_says_nothing(write: Write) -> None:
    assert parse(NodeFlags, ["--config", write("# later\n")]) == parse(NodeFlags, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax_num_seq: 3", ":2: unknown key max_num_seq, did you mean max_num_seqs?"),
        ("decoed: {port: 1}", ":1: unknown key decoed, did you mean decode?"),
        ("decode:\n  max_queue: 3", ":2: unknown key max_queue of decode; it is one of proxy"),
        ("config: other.yaml", ":1: unknown key config"),
        ("port: 1\n\nport: 2", ":3: port is given twice, first in line 1"),
        ("decode: {port: 1}\ndecode: 2", ":2: decode is given twice, first in line 1; the value goes into serve:"),
        ("proxy: a\nproxy: {}", ":2: proxy is given twice, first in line 1; the value goes into prefill: and decode:"),
        ("max-queue: 1\nmax_queue: 2", ":2: max_queue is given twice, first in line 1"),
        ("port: {a: 1}", ":1: port must be a value or a list of values"),
        ("proxy_args: [[a]]", ":1: proxy_args must be a value or a list of values"),
        ("[a]: 1", ":1: a key must be the name of a flag"),
        ("model: " + "[" * 5000, ": no valid YAML for flags: it is nested far too deeply"),
        ("- port", ": must be a mapping of flag names to values, such as"),
        ("port: [1", ":1: no valid YAML: "),
        ("port: 1\n---\nport: 2", ":2: no valid YAML: "),
        ("port: \x07", ": no valid YAML: "),
        ("\nport: 99999", ":2: port is '99999': must be less than or equal to 65535"),
        ("block_size: 12", ":1: block_size is 12: must be 8, 16 or 32"),
        ("port: yes", ":1: port is 'yes': must be a valid integer"),
        ("proxy: [localhost]", ":1: proxy is localhost: 'localhost' is no endpoint"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(
    write: Write, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    with pytest.raises(SystemExit) as exit_info:
        parse(DecodeConfig, ["--config", path], prog="decode")
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert path + message in error
    assert error.startswith("decode: ")
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"port: \xff")
    for name, message in (("gone", "No such file"), (".", "Is a directory"), ("bytes", "is no text in UTF-8")):
        with pytest.raises(SystemExit):
            parse(NodeFlags, ["--config", str(tmp_path / name)])
        assert message in capsys.readouterr().err


# --- tandem config --------------------------------------------------------------------------------------------------


def _shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, tuple[str, str]]:
    """By name, (value, origin)."""
    assert main(["config", *argv]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if ": " in line]
    parts = [line.rsplit("  # ", 1) for line in lines]
    return {value.split(": ", 1)[0]: (value.split(": ", 1)[1].strip(), origin) for value, origin in parts}


def test_config_shows_every_value_and_where_it_comes_from(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("decode:\n  max_num_seqs: 4\n")
    monkeypatch.setenv("TANDEM_SWAP_SPACE", "4")
    shown = _shown(capsys, "decode", "my/model", "--config", path, "--no-enable-prefix-caching")
    assert set(shown) == set(DecodeConfig.model_fields)
    assert shown["max_num_seqs"] == ("4", f"{path}:2")
    assert shown["swap_space"] == ("4GiB", "TANDEM_SWAP_SPACE")
    assert shown["enable_prefix_caching"] == ("false", "--enable-prefix-caching")
    assert shown["model"] == ("my/model", "--model")
    assert shown["max_model_len"] == ("null", "default")


def test_secrets_are_not_shown(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "hidden")
    assert _shown(capsys, "proxy")["# api_key"] == ("not shown", "TANDEM_API_KEY")
    assert main(["config", "proxy", "--config", write("proxy: {api_key: hidden}")]) == 0
    assert "hidden" not in capsys.readouterr().out


@pytest.mark.parametrize("process", PROCESSES)
def test_what_config_prints_is_a_file_that_gives_the_same_config(
    process: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["a: b # c", "--log-level", "debug"]
    if process != "proxy":
        argv += ["--record-steps", "steps.jsonl"]
        argv += ["--kv-cache-memory-bytes", "1000000001B", "--swap-space", "0.5", "--block-size", "8"]
    if process == "serve":
        argv += ["--proxy-args", "--api-key 'a b'"]
    assert main(["config", process, *argv]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{process}:\n")
    config_class = config_class_of(process)
    assert issubclass(config_class, NodeFlags | ProxyConfig | ServeConfig)
    again: Resolved[NodeFlags | ProxyConfig | ServeConfig] = read_config(config_class, ["--config", write(printed)])
    assert again.config == parse(config_class, argv)


def test_config_without_a_command_is_that_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(capsys, "--decode", "3")["decode"] == ("3", "--decode")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sevre"], "tandem config: argument command: invalid choice: 'sevre' (choose from 'serve'"),
        (["decode", "--prot", "1"], "tandem config decode: unknown flag --prot, did you mean --port?"),
        (["proxy", "--port", "x"], "tandem config proxy: --port is 'x': must be a valid integer"),
    ],
)
def test_config_refuses_what_the_command_would(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["config", *argv])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
