"""One engine gives transformers' greedy tokens, whatever the chunking, the batch, the cache and the preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REPRESENTATIVE = (
    "chat_unicode",
    "text_code",
    "length_1",
    "length_15",
    "length_16",
    "length_17",
    "length_33",
    "length_257",
)


def prompts_of(cases: dict[str, Any], names: Any = None) -> dict[str, list[int]]:
    return {name: case.prompt_token_ids for name, case in cases.items() if names is None or name in names}


def check(cases: dict[str, Any], outputs: dict[str, list[int]]) -> None:
    for name, token_ids in outputs.items():
        cases[name].check(token_ids)


def test_mixed_batch_in_chunks_of_64_cold_then_warm(generator: Callable[..., Any], cases: dict[str, Any]) -> None:
    one = generator("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "600")
    prompts = prompts_of(cases, REPRESENTATIVE)
    check(cases, one.generate(prompts))
    check(cases, one.generate(prompts))
    assert one.engine.stats().prefix_cache_hits >= 256 + 32


@pytest.mark.parametrize("mode", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_preemption_changes_no_token(generator: Callable[..., Any], cases: dict[str, Any], mode: str) -> None:
    flags = ["--num-gpu-blocks-override", "22", "--max-num-batched-tokens", "128", "--max-model-len", "336"]
    one = generator(*flags, "--preemption-mode", mode, "--swap-space", "64MiB")
    check(cases, one.generate(prompts_of(cases, REPRESENTATIVE)))
    stats = one.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swap_preemptions == (stats.num_preemptions if mode == "swap" else 0)


@pytest.mark.parametrize("block_size", ["8", pytest.param("32", marks=pytest.mark.slow)])
def test_block_sizes_change_no_token(generator: Callable[..., Any], cases: dict[str, Any], block_size: str) -> None:
    one = generator("--block-size", block_size, "--num-gpu-blocks-override", "300")
    prompts = prompts_of(cases, ("chat_unicode", "length_16", "length_33", "length_257"))
    check(cases, one.generate(prompts))
    check(cases, one.generate(prompts))
    assert one.engine.stats().prefix_cache_hits >= 256 + 32


def test_seeded_output_alone_and_beside_strangers(generator: Callable[..., Any], cases: dict[str, Any]) -> None:
    one = generator("--num-gpu-blocks-override", "600")
    params = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    alone = one.generate(prompts_of(cases, ["text_story"]), **params)["text_story"]
    one.engine.reset_prefix_cache()
    together = one.generate(prompts_of(cases, REPRESENTATIVE) | prompts_of(cases, ["text_story"]), **params)
    assert together["text_story"] == alone


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("is_batched", [False, True], ids=["alone", "batched"])
def test_whole_grid(generator: Callable[..., Any], cases: dict[str, Any], chunk: int, is_batched: bool) -> None:
    one = generator("--max-num-batched-tokens", str(chunk), "--max-num-seqs", str(min(chunk, 64)))
    prompts = prompts_of(cases)
    batches = [prompts] if is_batched else [{name: prompt} for name, prompt in prompts.items()]
    for _ in ("cold", "warm"):
        for batch in batches:
            check(cases, one.generate(batch))
