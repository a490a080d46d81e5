"""The served model gives transformers' greedy tokens, split and not, alone and beside others, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(300)
def test_split_equals_transformers_in_a_mixed_batch_cold(split: Any, cases: dict[str, Any], together: Any) -> None:
    together(*[lambda case=case: split.check_case(case) for case in cases.values()])
    split.assert_pools_idle()


@pytest.mark.parametrize("name", ["chat_unicode", "text_code", "length_1", "length_16", "length_33", "length_1000"])
def test_split_equals_transformers_alone_and_warm(split: Any, cases: dict[str, Any], name: str) -> None:
    split.check_case(cases[name])
    again = split.complete(cases[name].prompt_token_ids)
    cases[name].check(again["choices"][0]["token_ids"])
    num_prompt = len(cases[name].prompt_token_ids)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (num_prompt - 1) // 16 * 16


@pytest.mark.parametrize("name", ["chat_reason", "text_cjk", "length_17", "length_257"])
def test_without_prefill_node_equals_transformers(single: Any, cases: dict[str, Any], name: str) -> None:
    single.check_case(cases[name])


@pytest.mark.parametrize(("mode", "block_size"), [("swap", 8), ("recompute", 32)])
def test_preempted_at_a_decode_node_that_fetches(
    own_service: Any, cases: dict[str, Any], together: Any, mode: str, block_size: int
) -> None:
    """Small and large blocks, and a pool that holds a third of what is asked for at once."""
    flags = ["--block-size", str(block_size), "--num-gpu-blocks-override", str(352 // block_size + 1)]
    flags += ["--max-model-len", "352", "--preemption-mode", mode, "--swap-space", "64MiB"]
    client = own_service(node_flags=flags)
    names = ("chat_unicode", "text_code", "length_15", "length_16", "length_17", "length_33", "length_64", "length_257")
    [decode] = [node for node in client.service.nodes if node.role == "decode"]
    for _ in range(3):  # who meets whom is chance; warm prompts meet at once
        together(*[lambda name=name: client.check_case(cases[name]) for name in names])
        if client.metric(decode, "vllm:num_preemptions_total"):
            break
    assert client.metric(decode, "vllm:num_preemptions_total") > 0
    by_swap = sum(
        float(line.rsplit(" ", 1)[1])
        for line in client.metrics(decode).splitlines()
        if line.startswith("tandem:preemptions_total{") and 'mode="swap"' in line
    )
    assert (by_swap > 0) == (mode == "swap")
    client.assert_pools_idle()


SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 4711, "ignore_eos": True, "max_tokens": 24}


EVERYTHING = {
    "temperature": 1.0,
    "min_p": 0.02,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"260": 4, "28": -100},
    "min_tokens": 20,
    "bad_words": ["the", "and"],
    "ignore_eos": False,
}


@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["filters", "everything"])
def test_seeded_sampling_is_the_same_alone_in_a_batch_split_and_not(
    split: Any, single: Any, cases: dict[str, Any], together: Any, extra: dict[str, Any]
) -> None:
    prompt = cases["text_story"].prompt_token_ids
    fields = SEEDED | extra
    alone = split.token_ids(prompt, **fields)
    strangers = [
        lambda i=i: split.token_ids(cases["length_64"].prompt_token_ids, **(fields | {"seed": i})) for i in range(7)
    ]
    in_batch, *others = together(lambda: split.token_ids(prompt, **fields), *strangers)
    assert in_batch == alone
    assert single.token_ids(prompt, **fields) == alone
    assert len({tuple(o) for o in others}) > 1, "seeds make no difference"
