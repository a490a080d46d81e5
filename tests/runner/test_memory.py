"""The sum behind the number of blocks: by numbers, nothing is measured here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config import EngineFlags, PreemptionMode, parse
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.runner.memory import MemoryUse, PoolPlan, check_memory_flags, has_given_size, plan_pool
from common.runner.process_memory import Bound, Peak
from common.scheduling.config import SchedulerConfig

MIB = 2**20
LAYOUT = KVLayout(
    num_layers=16, num_kv_heads=16, head_dim=32, block_size=16, dtype="float32", model_fingerprint="m"
)  # a block is 1 MiB
USE = MemoryUse(
    limit=Bound(10_000 * MIB, "control group /pod"),
    free=Bound(9_000 * MIB, "this machine"),
    process_bytes=100 * MIB,
    weight_bytes=400 * MIB,
    peak=Peak(200 * MIB, is_exact=True),
)


def plan(use: MemoryUse, *flags: str, max_model_len: int = 160, with_head: bool = True) -> PoolPlan:
    parsed = parse(EngineFlags, list(flags))
    limits = SchedulerConfig(
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        max_num_seqs=parsed.max_num_seqs,
        max_model_len=max_model_len,
    )
    return plan_pool(use, LAYOUT, parsed, limits, with_head=with_head)


def given(*flags: str, **fields: object) -> PoolPlan:
    return plan(replace(USE, peak=None), *flags, **fields)


def refusal(use: MemoryUse, *flags: str, **fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(use, *flags, **fields)
    return caught.value.message


def test_a_block_is_a_mebibyte() -> None:
    assert LAYOUT.block_bytes == MIB


def test_the_pool_is_the_share_less_process_weights_and_worst_step() -> None:
    found = plan(USE, "--swap-space", "0")
    assert found.num_blocks == 2000 - 100 - 400 - 200
    assert found.num_usable == 1299  # the null block holds nothing
    assert found.capacity_tokens == 1299 * 16
    assert found.num_full_length == 129.9
    assert found.num_host_blocks == 0


def test_an_eighth_of_what_is_left_is_the_host_pool_unless_a_flag_says_otherwise() -> None:
    found = plan(USE)
    assert found.num_host_blocks == 1300 // 8
    assert found.num_blocks == 1300 - 1300 // 8
    assert plan(USE, with_head=False).num_host_blocks == 0


def test_the_default_host_pool_takes_nothing_from_the_last_full_length_request() -> None:
    """160 tokens are 10 blocks, and the null block."""
    scarce = replace(USE, weight_bytes=USE.weight_bytes + (1300 - 12) * MIB)  # 12 blocks are left
    found = plan(scarce)
    assert (found.num_blocks, found.num_host_blocks) == (11, 1)
    scarcer = replace(USE, weight_bytes=USE.weight_bytes + (1300 - 11) * MIB)
    assert (plan(scarcer).num_blocks, plan(scarcer).num_host_blocks) == (11, 0)


def test_every_number_of_the_sum_is_on_a_line_of_its_own() -> None:
    lines = plan(USE, "--swap-space", "50MiB").lines
    assert lines[1].split()[:2] == ["x", "0.2"]
    assert [line.split("MiB")[0].split() for line in lines if "MiB" in line] == [
        ["10,000.0"],
        ["=", "2,000.0"],
        ["-", "100.0"],
        ["-", "400.0"],
        ["-", "200.0"],
        ["-", "50.0"],
        ["=", "1,250.0"],
    ]
    text = "\n".join(plan(USE).lines)
    assert "control group /pod" in text
    assert "--cpu-memory-utilization" in text
    assert "128 tokens of 64 requests, context 160" in text


def test_a_peak_that_may_be_less_is_said_to_be() -> None:
    inexact = replace(USE, peak=Peak(200 * MIB, is_exact=False))
    assert plan(inexact).num_blocks == plan(USE).num_blocks
    assert "at most" in "\n".join(plan(inexact).lines)
    assert "at most" not in "\n".join(plan(USE).lines)


def test_the_host_pool_comes_out_of_the_same_memory_and_only_where_requests_are_preempted() -> None:
    with_swap = plan(USE, "--swap-space", "300.5MiB")
    assert with_swap.num_host_blocks == 300
    assert with_swap.num_blocks == 1000
    prefill = plan(USE, "--swap-space", "300MiB", with_head=False)
    assert (prefill.num_host_blocks, prefill.num_blocks) == (0, 1300)
    assert "less than one KV block of 1048576" in refusal(USE, "--swap-space", "1KiB")


def test_never_more_than_is_free() -> None:
    crowded = replace(USE, free=Bound(500 * MIB, "control group /pod"))
    found = plan(crowded, "--swap-space", "100MiB")
    assert found.num_blocks == 500 - 200 - 100
    signs = [(line[0], line.split("MiB")[0].split()[-1]) for line in found.lines]
    assert signs == [(" ", "10,000.0"), ("=", "500.0"), ("-", "200.0"), ("-", "100.0"), ("=", "200.0")]
    assert "less than its share of 0.2 is free" in found.lines[0]
    assert "control group /pod" in found.lines[1]


def test_flags_that_do_not_go_together_are_refused_before_anything_is_measured() -> None:
    def check(*argv: str, mode: PreemptionMode = "auto") -> None:
        check_memory_flags(parse(EngineFlags, argv), SchedulerConfig(preemption_mode=mode))

    with pytest.raises(ConfigError, match="both given, one is enough"):
        check("--num-gpu-blocks-override", "40", "--kv-cache-memory-bytes", "1GiB")
    with pytest.raises(ConfigError, match="give --swap-space too"):
        check("--num-gpu-blocks-override", "40", mode="swap")
    check("--num-gpu-blocks-override", "40", "--swap-space", "1", mode="swap")
    check(mode="swap")


def test_exactly_one_full_length_request_is_enough() -> None:
    """1300 blocks are left, one of them is the null block."""
    assert plan(USE, max_model_len=1299 * 16).num_full_length == 1.0
    message = refusal(USE, max_model_len=1299 * 16 + 1)
    assert "one request of 20785 tokens need 1,301.0 MiB, and 1,300.0 MiB are left of 2,000.0 MiB" in message
    assert "100.0 MiB for the process, 400.0 MiB for weights, 200.0 MiB for the worst step" in message
    assert "raise --cpu-memory-utilization to 0.21" in message
    assert "--kv-cache-memory-bytes, at least 1301MiB" in message
    assert "lower --max-model-len to 20784" in message


def test_what_the_refusal_advises_helps() -> None:
    message = refusal(USE, "--cpu-memory-utilization", "0.0705", max_model_len=16 * 200)
    assert "raise --cpu-memory-utilization to 0.1, " in message  # 901 of 10,000 are needed
    assert plan(USE, "--cpu-memory-utilization", "0.1", max_model_len=16 * 200).num_full_length >= 1
    assert "lower --max-model-len to 64" in message
    assert plan(USE, "--cpu-memory-utilization", "0.0705", max_model_len=64).num_full_length >= 1
    assert given("--kv-cache-memory-bytes", "201MiB", max_model_len=16 * 200).num_full_length == 1


def test_a_share_that_does_not_hold_the_weights_is_refused_without_impossible_advice() -> None:
    message = refusal(USE, "--cpu-memory-utilization", "0.03")
    assert "and 0.0 MiB are left of 300.0 MiB (--cpu-memory-utilization 0.03 of 10,000.0 MiB" in message
    assert "raise --cpu-memory-utilization to 0.08" in message
    assert "--max-model-len" not in message
    assert "--max-num-seqs" not in message  # 411 are missing, the step takes 200


def test_a_step_that_takes_what_is_missing_is_named() -> None:
    large_step = replace(USE, peak=Peak(1495 * MIB, is_exact=True))
    message = refusal(large_step)
    assert "lower --max-num-batched-tokens (128)" in message
    assert "lower --max-num-seqs (64)" in message
    assert "--swap-space" not in message
    assert "lower --swap-space" in refusal(USE, "--swap-space", "1299MiB")


def test_when_the_machine_is_full_no_share_is_advised() -> None:
    message = refusal(replace(USE, free=Bound(205 * MIB, "this machine")))
    assert "5.0 MiB are left of 205.0 MiB that are free with the weights loaded (this machine)" in message
    assert "end other processes" in message
    assert "raise --cpu-memory-utilization" not in message
    assert "give --kv-cache-memory-bytes" not in message


@pytest.mark.parametrize(
    ("flags", "num_blocks"),
    [
        (["--num-gpu-blocks-override", "77"], 77),
        (["--kv-cache-memory-bytes", "64.9MiB"], 64),
        (["--num-gpu-blocks-override", "77", "--kv-cache-memory-bytes", "64MiB"], 77),
    ],
)
def test_a_given_size_is_taken_and_the_line_says_from_where(flags: list[str], num_blocks: int) -> None:
    found = given(*flags, "--swap-space", "10MiB")
    assert found.num_blocks == num_blocks
    assert found.num_host_blocks == 10
    assert f"{num_blocks}.0 MiB  KV blocks, given by {flags[0]}" in "\n".join(found.lines)
    assert has_given_size(parse(EngineFlags, flags))


def test_nothing_is_given_by_default() -> None:
    assert not has_given_size(parse(EngineFlags, []))


def test_a_given_size_must_be_free() -> None:
    few = replace(USE, peak=None, free=Bound(100 * MIB, "this machine"))
    assert plan(few, "--num-gpu-blocks-override", "100").num_blocks == 100
    message = refusal(few, "--num-gpu-blocks-override", "101")
    assert "--num-gpu-blocks-override asks for 101.0 MiB of KV blocks, but 100.0 MiB are free (this machine)" in message
    message = refusal(few, "--kv-cache-memory-bytes", "91MiB", "--swap-space", "10MiB")
    assert "91.0 MiB of KV blocks beside 10.0 MiB of --swap-space" in message


def test_given_bytes_must_hold_one_full_length_request() -> None:
    assert given("--kv-cache-memory-bytes", "11MiB").num_full_length == 1.0
    message = refusal(replace(USE, peak=None), "--kv-cache-memory-bytes", "10MiB")
    assert "is 10.0 MiB" in message
    assert "one request of 160 tokens need 11.0 MiB; raise it or lower --max-model-len to 144" in message
    assert "--max-model-len" not in refusal(replace(USE, peak=None), "--kv-cache-memory-bytes", "1MiB")
    assert "--kv-cache-memory-bytes is 1 B," in refusal(replace(USE, peak=None), "--kv-cache-memory-bytes", "1B")


def test_a_given_number_of_blocks_may_be_less_than_the_context() -> None:
    found = given("--num-gpu-blocks-override", "6")
    assert found.capacity_tokens == 80
    assert found.num_full_length == 0.5
