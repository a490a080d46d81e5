"""Start-up of an engine on a tiny model: how the pool is sized, what is logged, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import NodeFlags, parse
from common.engine.build import EngineParts, build_engine
from common.errors import ConfigError
from common.runner.model_runner import ModelRunner
from common.runner.process_memory import Bound, Peak, ProcessMemory
from kernels import dispatch

GIB = 2**30
Build = Callable[..., EngineParts]


@pytest.fixture
def build(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Build:
    """On a machine of 20 GiB, all free, so that its share holds this process whatever ran in it before."""
    monkeypatch.setattr(ProcessMemory, "limit", lambda _: Bound(20 * GIB, "all of this machine"))
    monkeypatch.setattr(ProcessMemory, "free", lambda _: Bound(20 * GIB, "this machine"))
    caplog.set_level(logging.INFO, "common.engine.build")

    def make(*flags: str, with_head: bool = True) -> EngineParts:
        return build_engine(tiny_model_dir, parse(NodeFlags, ["--num-threads", "1", *flags]), with_head=with_head)

    return make


@pytest.fixture
def is_run(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Not empty once a runner has executed a step."""
    seen: list[bool] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda *args: seen.append(True) or execute(*args))
    return seen


def test_the_sum_is_logged_and_is_right(build: Build, is_run: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    parts = build()
    assert is_run
    measuring, title, *sums, pool, _, summary = caplog.messages
    assert measuring.startswith("measuring the memory of the worst step: 128 tokens of 64 requests")
    assert title == "KV memory, line by line:"
    mib = [float(line.split("MiB")[0].replace(",", "").split()[-1]) for line in sums if "MiB" in line]
    assert mib[:2] == [20480.0, 4096.0]
    share, *taken, left = mib[1:]
    assert left == pytest.approx(share - sum(taken), abs=0.5)
    assert parts.kv_cache.num_blocks == pytest.approx(left * 2**20 / parts.layout.block_bytes, rel=1e-3)
    num_usable = parts.kv_cache.num_blocks - 1
    assert f"{num_usable} blocks of 16 tokens" in pool
    assert f"{num_usable * 10 // 32 / 10} full-length requests of 512 tokens fit" in pool
    assert summary.startswith("engine_ready ")
    kernels = dispatch.cpu_choice().name
    assert f" kernels={kernels} dtype=float32 quantization=none threads=1 " in summary
    assert f" threads=1 max_model_len=512 token_budget=128 max_num_seqs=64 blocks={num_usable} " in summary


def test_what_is_measured_is_what_is_subtracted(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([GIB // 2, GIB * 3 // 2])  # before the weights, after
    monkeypatch.setattr(ProcessMemory, "held_bytes", lambda _: next(held))
    monkeypatch.setattr(ProcessMemory, "measure_peak", lambda *_: Peak(2 * GIB, is_exact=True))
    parts = build("--block-size", "32", "--swap-space", "0")
    assert parts.kv_cache.num_blocks == GIB // 2 // parts.layout.block_bytes


def test_a_given_number_of_blocks_needs_no_profiling_run(
    build: Build, is_run: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    parts = build("--num-gpu-blocks-override", "11")
    assert not is_run
    assert parts.kv_cache.num_blocks == 11
    assert "KV blocks, given by --num-gpu-blocks-override" in caplog.text
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("requests longer than 160 tokens are refused")
    assert warning.endswith("--max-model-len is 512")


def test_given_bytes(build: Build, is_run: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    parts = build("--kv-cache-memory-bytes", "1MiB")
    assert not is_run
    assert parts.kv_cache.num_blocks == 2**20 // parts.layout.block_bytes
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_head_gets_the_host_pool_and_a_prefill_node_does_not(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--num-gpu-blocks-override", "40", "--swap-space", "1MiB", "--preemption-mode", "swap")
    decode = build(*flags)
    num_host_blocks = 2**20 // decode.layout.block_bytes
    assert len(decode.kv_cache.host_pool) == num_host_blocks
    assert decode.engine.scheduler.cache.swap_space.num_blocks == num_host_blocks
    assert f"host pool: {num_host_blocks} blocks" in caplog.text
    prefill = build(*flags, with_head=False)
    assert len(prefill.kv_cache.host_pool) == 0
    assert prefill.engine.scheduler.config.preemption_mode == "recompute"


def test_a_prefill_node_is_measured_too(build: Build, is_run: list[bool]) -> None:
    assert build(with_head=False).kv_cache.num_blocks > 0
    assert is_run


def test_flags_of_the_scheduler_reach_it(build: Build) -> None:
    config = build(
        *("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "600", "--max-num-seqs", "7"),
        *("--long-prefill-token-threshold", "33", "--max-num-partial-prefills", "2"),
        *("--scheduling-policy", "fcfs", "--preemption-mode", "recompute", "--max-model-len", "500"),
    ).engine.scheduler.config
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) == (600, 7, 500)
    assert (config.enable_chunked_prefill, config.long_prefill_token_threshold) == (True, 33)
    assert (config.max_num_partial_prefills, config.scheduling_policy) == (2, "fcfs")
    assert config.preemption_mode == "recompute"


def test_the_share_of_a_gpu_has_no_effect_and_the_log_says_so(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    build("--num-gpu-blocks-override", "40", "--gpu-memory-utilization", "0.5")
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "--gpu-memory-utilization has no effect" in warning
    assert "--cpu-memory-utilization (now 0.2)" in warning


def test_without_chunked_prefill_the_budget_holds_the_context_by_default(build: Build) -> None:
    config = build("--num-gpu-blocks-override", "40", "--no-enable-chunked-prefill").engine.scheduler.config
    assert config.max_num_batched_tokens == config.max_model_len == 512


def test_more_requests_than_the_budget_has_tokens_never_run_and_the_log_says_so(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    build("--num-gpu-blocks-override", "40", "--max-num-seqs", "256")
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "at most 128 requests run at once: --max-num-seqs is 256, but --max-num-batched-tokens only 128"


def test_where_steps_cannot_be_recorded_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    flags = parse(NodeFlags, ["--record-steps", str(tmp_path / "none" / "steps.jsonl")])
    with pytest.raises(ConfigError, match="--record-steps is"):
        build_engine(tmp_path / "no model", flags, with_head=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cpu-memory-utilization", "0.0001"], "raise --cpu-memory-utilization to 0."),
        (["--kv-cache-memory-bytes", "21GiB"], r"21,504\.0 MiB of KV blocks, but 20,480\.0 MiB are free"),
        (["--kv-cache-memory-bytes", "100KiB"], "one request of 512 tokens need"),
        (["--max-model-len", "513"], "--max-model-len is 513, the model's context has 512 tokens"),
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "128"],
            "--max-num-batched-tokens is 128 and --max-model-len is 512",
        ),
        (["--num-gpu-blocks-override", "40", "--preemption-mode", "swap"], "give --swap-space too"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(build: Build, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(*flags)
