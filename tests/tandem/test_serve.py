"""`tandem serve` as a command: what it starts, what it says, and how it ends. The processes are scripted."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.command_line import read_config
from common.config import EngineFlags, parse
from common.config_variables import QUIET
from common.errors import ConfigError, UnavailableError
from decode_node.config import DecodeConfig
from tandem import serve
from tandem.child import ChildSpec
from tandem.config import ServeConfig
from tandem.supervisor import Supervisor

MakeSpec = Callable[..., ChildSpec]


def _config(*argv: str) -> ServeConfig:
    return parse(ServeConfig, argv)


def _specs(*argv: str) -> list[ChildSpec]:
    return serve.make_specs(read_config(ServeConfig, argv), Path("/models/tiny"), 8000, "tcp://127.0.0.1:8100")


def _flag(spec: ChildSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def test_the_default_is_a_trio_that_shares_one_model() -> None:
    proxy, prefill, decode = _specs()
    assert [s.name for s in (proxy, prefill, decode)] == ["proxy", "prefill", "decode"]
    assert [s.command[1:4] for s in (proxy, prefill, decode)] == [
        ["-m", "tandem", role] for role in ("proxy", "prefill", "decode")
    ]
    for spec in (proxy, prefill, decode):
        assert spec.environment == QUIET
        assert _flag(spec, "--model") == "/models/tiny"
        assert _flag(spec, "--served-model-name") == "smollm2-135m-instruct"
    assert _flag(proxy, "--control-endpoint") == _flag(prefill, "--proxy") == _flag(decode, "--proxy")
    assert prefill.health_url != decode.health_url


def test_pools_are_numbered_and_flags_reach_only_whom_they_concern() -> None:
    specs = _specs("--prefill", "2", "--decode", "3", "--block-size", "32", "--no-enable-prefix-caching")
    assert [s.name for s in specs] == ["proxy", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    for spec in specs[1:]:
        assert _flag(spec, "--block-size") == "32"
        assert "--no-enable-prefix-caching" in spec.command
        assert "--max-num-seqs" not in spec.command  # not given: the node's own default holds
    assert "--block-size" not in specs[0].command


def test_each_node_records_its_steps_into_a_file_of_its_own() -> None:
    specs = _specs("--decode", "2", "--record-steps", "out/steps.jsonl")
    assert "--record-steps" not in specs[0].command
    files = [_flag(spec, "--record-steps") for spec in specs[1:]]
    assert files == ["out/steps.prefill.jsonl", "out/steps.decode-0.jsonl", "out/steps.decode-1.jsonl"]


def test_arguments_for_one_kind_of_process() -> None:
    proxy, prefill, decode = _specs("--decode-args", "--lease-seconds 3", "--proxy-args", "--api-key 'a b'")
    assert decode.command[-2:] == ["--lease-seconds", "3"]
    assert proxy.command[-2:] == ["--api-key", "a b"]
    assert "--lease-seconds" not in prefill.command


def test_what_is_passed_on_is_understood_by_every_process() -> None:
    from decode_node.config import DecodeConfig
    from prefill_node.config import PrefillConfig
    from proxy.config import ProxyConfig

    proxy, prefill, decode = _specs("--kv-cache-memory-bytes", "1GiB", "--max-model-len", "512", "--dtype", "bfloat16")
    for spec, config_class in ((proxy, ProxyConfig), (prefill, PrefillConfig), (decode, DecodeConfig)):
        parse(config_class, spec.command[4:])
    assert parse(DecodeConfig, decode.command[4:]).kv_cache_memory_bytes == 2**30


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "usable_cores", lambda: 8)
    assert [serve.threads_per_node(n) for n in (1, 2, 3, 20)] == [8, 4, 2, 1]
    assert _flag(_specs("--num-threads", "3")[1], "--num-threads") == "3"


def test_memory_is_shared_out() -> None:
    assert [serve.memory_per_node(n, 0.2) for n in (1, 2, 4, 8)] == [0.2, 0.2, 0.2, 0.1]
    many = _specs("--prefill", "4", "--decode", "6")
    assert {_flag(spec, "--cpu-memory-utilization") for spec in many[1:]} == {"0.0800"}
    given = _specs("--prefill", "4", "--decode", "6", "--cpu-memory-utilization", "0.05")
    assert {_flag(spec, "--cpu-memory-utilization") for spec in given[1:]} == {"0.05"}
    with pytest.raises(ConfigError, match=r"0\.4 for each of 3 nodes.*at most 0\.33"):
        _specs("--decode", "2", "--cpu-memory-utilization", "0.4")


def test_sizes_keep_their_unit_on_the_way_to_the_nodes() -> None:
    for text, num_bytes in (("1000B", 1000), ("2", 2**31), ("512MiB", 2**29)):
        [_, _, decode] = _specs("--swap-space", text)
        assert parse(EngineFlags, ["--swap-space", _flag(decode, "--swap-space")]).swap_space == num_bytes


def test_a_folder_is_no_record_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder"):
        _specs("--record-steps", str(tmp_path))
    assert "x.decode" in _flag(_specs("--record-steps", "x" * 300)[2], "--record-steps")  # left to the node to refuse


def test_a_port_in_use_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            serve.available_port("127.0.0.1", port)


def test_the_model_is_resolved_first_and_its_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["no-such-model"]) == 1
    assert capsys.readouterr().err.startswith("tandem serve: model 'no-such-model' is neither an alias")


def test_the_curl_line_is_a_valid_request() -> None:
    text = serve.ready_message(_config(), "http://127.0.0.1:8000", "tcp://127.0.0.1:8100")
    command = text[text.index("curl") : text.index("\n\nAnother node")]
    words = [word for word in shlex.split(command) if word.strip()]
    body = json.loads(words[words.index("-d") + 1])
    assert body["stream"] is True
    assert body["model"] == "smollm2-135m-instruct"
    assert "http://127.0.0.1:8000/v1/chat/completions" in words


def test_the_other_node_fits_this_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("--block-size", "32", "--max-model-len", "1024", "--served-model-name", "gpt x", "--decode", "2")
    text = serve.ready_message(config, "http://127.0.0.1:8000", "tcp://127.0.0.1:8100")
    [line] = [line for line in text.splitlines() if line.startswith("Another node: ")]
    _, command, model, *flags = shlex.split(line.removeprefix("Another node: "))
    assert (command, model) == ("decode", "smollm2-135m-instruct")
    node = parse(DecodeConfig, flags)
    assert (node.block_size, node.max_model_len, node.served_model_name) == (32, 1024, "gpt x")
    assert node.proxy == ("tcp://127.0.0.1:8100",)
    assert "Authorization" not in text
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    text = serve.ready_message(config, "http://127.0.0.1:8000", "tcp://127.0.0.1:8100")
    assert "-H 'Authorization: Bearer '$TANDEM_API_KEY" in text
    assert "secret" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_with_status_0(
    child_spec: MakeSpec, log_dir: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = child_spec("proxy", "proxy", "--control-endpoint", "tcp://127.0.0.1:1")
    run = asyncio.create_task(serve.run(_config(), [proxy, child_spec("decode", "decode")], log_dir))
    out = ""
    async with asyncio.timeout(30):
        while "Ready" not in out:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
        os.kill(os.getpid(), number)
        assert await run == 0


async def test_a_vital_death_ends_it_with_an_error(child_spec: MakeSpec, log_dir: Path) -> None:
    proxy = child_spec("proxy", "proxy", "--control-endpoint", "tcp://127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"decode ended with exit status 7(.|\n)*out of luck"):
        await serve.run(_config(), [proxy, child_spec("decode", "decode", "dies")], log_dir)


class _Stream(io.StringIO):
    """Keeps what is written, says when a text is among it, and may fail as a pipe that nobody reads or a full disk."""

    def __init__(self, awaited: str, error: OSError | None = None) -> None:
        super().__init__()
        self.has_come = asyncio.Event()
        self._awaited = awaited
        self._error = error

    def flush(self) -> None:
        if self._awaited in self.getvalue():
            self.has_come.set()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
async def test_it_goes_on_when_what_it_says_goes_nowhere(
    child_spec: MakeSpec, log_dir: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    out, err = _Stream("Ready", error), _Stream("The service goes on without it", error)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    made: list[Supervisor] = []
    monkeypatch.setattr(serve, "Supervisor", lambda *parts: made.append(Supervisor(*parts)) or made[0])
    proxy = child_spec("proxy", "proxy", "--control-endpoint", "tcp://127.0.0.1:1")
    specs = [proxy, child_spec("prefill", "prefill"), child_spec("decode", "decode")]
    run = asyncio.create_task(serve.run(_config(), specs, log_dir))
    async with asyncio.timeout(60):
        await _unless_ended(run, out.has_come)
        made[0].children[1].kill()
        await _unless_ended(run, err.has_come)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0


async def _unless_ended(run: asyncio.Task[int], event: asyncio.Event) -> None:
    came = asyncio.create_task(event.wait())
    await asyncio.wait({run, came}, return_when=asyncio.FIRST_COMPLETED)
    came.cancel()
    assert not run.done()


@pytest.mark.parametrize("is_ignored", [True, False])
async def test_a_hangup_ends_it_unless_nohup_has_it_ignored(
    child_spec: MakeSpec, log_dir: Path, monkeypatch: pytest.MonkeyPatch, is_ignored: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    err = _Stream("Starting")
    monkeypatch.setattr(sys, "stderr", err)
    try:
        run = asyncio.create_task(serve.run(_config(), [child_spec("decode", "decode", "never")], log_dir))
        async with asyncio.timeout(60):
            await _unless_ended(run, err.has_come)
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is is_ignored
            os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGHUP)
            assert await run == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# --- with a config file ---------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "tandem.yaml"
    path.write_text(
        "max_num_seqs: 8\n"
        "log_level: warning\n"
        "decode: {max_num_seqs: 4, num_threads: 3, cpu_memory_utilization: 0.6, drain_seconds: 1}\n"
        "proxy: {port: 1, api_key: secret}\n"
        "serve: {num_threads: 2, dtype: bfloat16}\n"
    )
    return str(path)


def test_processes_read_their_own_sections_and_only_what_serve_was_given_is_passed_on(config_file: str) -> None:
    from decode_node.config import DecodeConfig
    from prefill_node.config import PrefillConfig
    from proxy.config import ProxyConfig

    specs = _specs("--config", config_file, "--block-size", "8", "--insecure")
    proxy = parse(ProxyConfig, specs[0].command[4:])
    prefill = parse(PrefillConfig, specs[1].command[4:])
    decode = parse(DecodeConfig, specs[2].command[4:])
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (8, 4)
    assert (prefill.num_threads, decode.num_threads) == (2, 3)
    assert (prefill.cpu_memory_utilization, decode.cpu_memory_utilization) == (0.2, 0.6)
    assert (prefill.drain_seconds, decode.drain_seconds) == (5, 1)
    assert (prefill.block_size, decode.block_size, prefill.dtype, decode.dtype) == (8, 8, "bfloat16", "bfloat16")
    assert proxy.log_level == decode.log_level == "warning"
    assert proxy.insecure
    assert prefill.insecure
    assert (proxy.port, proxy.api_key is not None) == (8000, True)
    assert not any("secret" in word for spec in specs for word in spec.command)  # whoever lists processes sees those


def test_a_flag_of_serve_wins_over_every_section(config_file: str) -> None:
    [_, prefill, decode] = _specs(
        "--config", config_file, "--num-threads", "1", "--max-num-seqs", "2", "--drain-seconds", "9"
    )
    for spec in (prefill, decode):
        assert [_flag(spec, name) for name in ("--num-threads", "--max-num-seqs")] == ["1", "2"]
        assert float(_flag(spec, "--drain-seconds")) == 9


def test_what_the_file_says_in_vain_is_said(config_file: str) -> None:
    resolved = read_config(ServeConfig, ["--config", config_file])
    assert serve.ignored_keys(resolved) == [
        f"{config_file}:4: proxy.port does not count here, `tandem serve` decides it"
    ]
    assert serve.ignored_keys(read_config(ServeConfig, [])) == []


def test_what_stands_at_the_top_in_vain_is_said_too(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("port: 8000\nfetch_port: 7000\ndecode: {fetch_port: 1}\n")
    resolved = read_config(ServeConfig, ["--config", str(path)])
    assert [line.split(" ")[:2] for line in serve.ignored_keys(resolved)] == [
        [f"{path}:2:", "fetch_port"],
        [f"{path}:3:", "decode.fetch_port"],
    ]
    specs = serve.make_specs(resolved, Path("/models/tiny"), 8000, "tcp://127.0.0.1:8100")
    assert parse(DecodeConfig, specs[2].command[4:]).fetch_port == 0, "what is at the top is not refused then"
