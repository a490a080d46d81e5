"""Our Llama against transformers': whole prompts, chunks, mixed batches, and what configs can vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.request import Request
from common.runner.input_batch import InputBatch
from common.scheduling.output import ScheduledRequest

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "as_many_kv_heads": {"num_key_value_heads": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
}


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 11 + 5) % 128 for i in range(count)]


def right_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([token_ids])).logits[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_whole_prompt(tiny: Callable[..., Any], name: str) -> None:
    reference, ours = tiny(**VARIANTS[name])
    prompt = tokens(50)
    torch.testing.assert_close(
        ours.logits([("a", prompt, 0, 50)]), right_logits(reference, prompt), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [1, 7, 8, 16])
def test_logits_in_chunks(tiny: Callable[..., Any], block_size: int, chunk: int) -> None:
    reference, ours = tiny(block_size=block_size)
    prompt = tokens(45)
    got = [ours.logits([("a", prompt, at, min(chunk, 45 - at))]) for at in range(0, 45, chunk)]
    torch.testing.assert_close(torch.cat(got), right_logits(reference, prompt), rtol=1e-3, atol=1e-3)


def test_logits_in_a_mixed_batch_of_single_rows_and_chunks(tiny: Callable[..., Any]) -> None:
    reference, ours = tiny()
    prompts = {f"r{i}": tokens(20 + 3 * i, i) for i in range(7)}
    for name, prompt in prompts.items():
        ours.logits([(name, prompt, 0, len(prompt) - (1 if name != "r6" else 9))])
    parts = [(name, p, len(p) - (1 if name != "r6" else 9), 1 if name != "r6" else 9) for name, p in prompts.items()]
    got = ours.logits(parts)
    right = torch.cat([right_logits(reference, p)[start:] for _, p, start, _ in parts])
    torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


def test_forward_is_left_between_two_layers(tiny: Callable[..., Any]) -> None:
    _, ours = tiny()
    asked = []

    def between(layer: int) -> bool:
        asked.append(layer)
        return layer < 1

    rows = ScheduledRequest(Request("a", tokens(5)), 0, 5, [1], is_last_chunk=True)
    batch = InputBatch(ours.shape).make([rows])
    assert ours.model.forward(batch, ours.cache.pool, between) is None
    assert asked == [0, 1]


def test_greedy_output_is_that_of_generate(tiny: Callable[..., Any]) -> None:
    reference, ours = tiny()
    prompt = tokens(30)
    with torch.inference_mode():
        right = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0
        )[0, 30:].tolist()
    text, computed = list(prompt), 0
    while len(text) < 70:
        logits = ours.logits([("a", text, computed, len(text) - computed)])[-1].clone()
        logits[1] = float("-inf")  # what min_new_tokens does to the end token
        computed = len(text)
        text.append(int(logits.argmax()))
    assert text[30:] == right


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256},
    ],
)
def test_far_positions(tiny: Callable[..., Any], rope: dict[str, Any]) -> None:
    """Report L-07: with a wrong theta short prompts look right and long ones do not."""
    reference, ours = tiny(block_size=32, max_position_embeddings=2048, rope_parameters=rope)
    prompt = tokens(1502)
    got = torch.cat([ours.logits([("a", prompt, at, min(500, 1502 - at))]) for at in range(0, 1502, 500)])
    torch.testing.assert_close(got[1490:], right_logits(reference, prompt)[1490:], rtol=1e-3, atol=2e-3)


def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(tiny: Callable[..., Any]) -> None:
    reference, ours = tiny(dtype="bfloat16")
    prompt = tokens(40)
    right = right_logits(reference, prompt)
    its_error = (right_logits(reference.to(torch.bfloat16), prompt).float() - right).abs().mean()
    our_error = (ours.logits([("a", prompt, 0, 40)]) - right).abs().mean()
    assert our_error < 1.5 * its_error
