"""Faults that users of other servers reported in public, each as its symptom (ids as in the list of reports)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.engine.events import ComputedEvent, HiddenEvent
from common.errors import InvalidRequestError
from common.request import FinishReason, Request


def hidden_states(one: Any, request_id: str, prompt: list[int]) -> list[np.ndarray]:
    """Hidden states of all tokens, as the prompt's log-probabilities need them, in the pieces that they come in."""
    one.engine.add(Request(request_id, prompt, want_all_hidden=True))
    pieces: list[np.ndarray] = []
    while True:
        for event in one.engine.step():
            if isinstance(event, HiddenEvent):
                pieces.append(event.rows)
            if isinstance(event, ComputedEvent):
                one.engine.release(request_id)
                return pieces


def test_p01_every_length_around_block_edges_cold_and_warm(tiny_generator: Callable[..., Any]) -> None:
    """With all blocks cached nothing was left to compute; a first repair broke caching of the last block."""
    one = tiny_generator("--block-size", "8")
    for num_tokens in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33):
        prompt = [(num_tokens * 13 + i * 7) % 199 for i in range(num_tokens)]
        cold = one.generate({"p": prompt}, max_tokens=4, ignore_eos=True)["p"]
        hits = []
        for _ in range(3):
            request = one.add(prompt, max_tokens=4, ignore_eos=True)
            while not request.is_finished:
                one.engine.step()
            assert request.output_token_ids == cold
            hits.append(request.num_cached_tokens)
        assert hits == [num_tokens // 8 * 8] * 3
    one.assert_nothing_held()


def test_p07_all_hidden_states_are_computed_even_when_the_prompt_is_cached(tiny_generator: Callable[..., Any]) -> None:
    """For cached tokens no logits existed: an assertion, or what an old buffer held, returned as numbers."""
    prompt = [(i * 41 + 3) % 199 for i in range(33)]
    whole = np.concatenate(hidden_states(tiny_generator(), "whole", prompt))
    assert whole.shape == (33, 32)
    for budget in (8, 16, 33):
        one = tiny_generator("--max-num-batched-tokens", str(budget))
        first = np.concatenate(hidden_states(one, "first", prompt))
        one.generate({"p": prompt}, max_tokens=2)
        second = np.concatenate(hidden_states(one, "second", prompt))
        np.testing.assert_array_equal(second, first)
        np.testing.assert_allclose(first, whole, rtol=1e-4, atol=1e-4)
        one.assert_nothing_held()


def test_q01_what_can_never_fit_is_refused_and_others_go_on(tiny_generator: Callable[..., Any]) -> None:
    """Larger than the pool, though the context allowed it: it blocked the queue, or preempted itself endlessly."""
    one = tiny_generator("--num-gpu-blocks-override", "13", "--block-size", "8", "--max-model-len", "400")  # 96 tokens
    with pytest.raises(InvalidRequestError, match=r"200 tokens.*96 tokens"):
        one.add([5] * 200)
    growing = one.add([5] * 80, max_tokens=300, ignore_eos=True)
    short = one.add([7] * 8, max_tokens=4, ignore_eos=True)
    while not (growing.is_finished and short.is_finished):
        one.engine.step()
    assert growing.finish_reason is FinishReason.LENGTH
    assert growing.num_tokens == 97  # the last one needs no slot
    assert len(short.output_token_ids) == 4
    one.assert_nothing_held()


@pytest.mark.parametrize("budget", [16, 64])
def test_q09_hidden_states_of_a_long_prompt_come_in_slices_of_the_budget(
    tiny_generator: Callable[..., Any], budget: int
) -> None:
    """A prompt times the vocabulary in one go ran the device out of memory: nothing here grows with the prompt."""
    one = tiny_generator("--max-num-batched-tokens", str(budget))
    prompt = [(i * 29 + 1) % 199 for i in range(500)]
    pieces = hidden_states(one, "long", prompt)
    assert sum(len(rows) for rows in pieces) == 500
    assert max(len(rows) for rows in pieces) <= budget
    one.assert_nothing_held()
