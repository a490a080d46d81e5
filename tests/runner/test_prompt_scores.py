"""Log-probabilities, ranks and top lists against float64, and those of prompts, in slices and pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import TokenLogprobs
from common.request import Request
from common.runner.logprobs import logprobs_of
from common.runner.prompt_scores import score_prompt
from common.sampling_params import SamplingParams

LEAST = -9999.0
levels = st.sampled_from([-math.inf, -20000.0, -3.5, -1.0, 0.0, 0.5, 2.0])  # many tie; no other two are close


def plain(logits: Sequence[float], token_id: int, count: int) -> TokenLogprobs:
    """In float64, one row; a row that has no distribution is impossible throughout."""
    row = np.array(logits, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = row - row.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
    if np.isnan(logprobs).any():
        logprobs[:] = LEAST
    logprobs = np.maximum(logprobs, LEAST)
    best = sorted(range(len(row)), key=lambda i: (-logprobs[i], i))[:count]
    rank = 1 + int((logprobs > logprobs[token_id]).sum())
    return TokenLogprobs(float(logprobs[token_id]), best, [float(logprobs[i]) for i in best], rank)


def check(found: TokenLogprobs, right: TokenLogprobs, *, is_end_open: bool = False) -> None:
    """is_end_open: several tie for the last place of the list, any of them may have it."""
    assert found.logprob == pytest.approx(right.logprob, rel=1e-5, abs=1e-5)
    assert found.top_logprobs == pytest.approx(right.top_logprobs, rel=1e-5, abs=1e-5)
    assert found.rank == right.rank
    num_sure = len(right.top_token_ids)
    if is_end_open and num_sure:
        num_sure = right.top_logprobs.index(right.top_logprobs[-1])
        last = list(zip(found.top_logprobs, found.top_token_ids, strict=True))[num_sure:]
        assert last == sorted(last), "of those that tie the lower one is first"
    assert found.top_token_ids[:num_sure] == right.top_token_ids[:num_sure]
    assert len(set(found.top_token_ids)) == len(right.top_token_ids)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 120))
def test_ranks_and_top_lists_where_many_tie(data: st.DataObject, vocab_size: int) -> None:
    rows = data.draw(st.lists(st.lists(levels, min_size=vocab_size, max_size=vocab_size), min_size=1, max_size=4))
    token_ids = [data.draw(st.integers(0, vocab_size - 1)) for _ in rows]
    counts = [data.draw(st.integers(0, 20)) for _ in rows]
    found = logprobs_of(torch.tensor(rows), token_ids, counts, with_ranks=True)
    for one, row, token_id, count in zip(found, rows, token_ids, counts, strict=True):
        check(one, plain(row, token_id, count), is_end_open=True)


@pytest.mark.parametrize("vocab_size", [7, 1000, 49152])
def test_random_logits(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    logits = draw.normal(0, 4, (6, vocab_size)).astype(np.float32)
    token_ids = [int(row.argsort()[-place]) for place, row in zip((1, 2, 3, 5, 6, 7), logits, strict=True)]
    counts = [20, 0, 1, 5, 7, 2]
    found = logprobs_of(torch.from_numpy(logits), token_ids, counts, with_ranks=True)
    for one, row, token_id, count in zip(found, logits, token_ids, counts, strict=True):
        check(one, plain(row.tolist(), token_id, count))
    assert [one.rank for one in found] == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_leaves_the_others(bad: float) -> None:
    rows = [[0.0, bad, 1.0], [0.0, 2.0, 1.0], [-math.inf] * 3]
    found = logprobs_of(torch.tensor(rows), [2, 2, 1], [2, 2, 2], with_ranks=True)
    for one, row in zip(found, rows, strict=True):
        assert all(map(math.isfinite, [one.logprob, *one.top_logprobs])), row
    check(found[1], plain(rows[1], 2, 2))
    assert found[0] == found[2] == TokenLogprobs(LEAST, [0, 1], [LEAST, LEAST], 1)


def test_ranks_are_left_out_unless_asked_for() -> None:
    [found] = logprobs_of(torch.tensor([[1.0, 3.0, 2.0]]), [0], [1])
    assert found.rank == 0


# --- prompts ------------------------------------------------------------------------------------------------------

HIDDEN, VOCAB = 6, 23


class Head:
    """Notes how many rows it was given at once."""

    def __init__(self) -> None:
        self.weight = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (HIDDEN, VOCAB)).astype(np.float32))
        self.sizes: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == torch.float32
        self.sizes.append(len(hidden))
        return hidden @ self.weight


def prompt_of(num_tokens: int, count: int = 3) -> tuple[Request, torch.Tensor]:
    draw = np.random.default_rng(num_tokens)
    params = SamplingParams(prompt_logprobs=count)
    prompt = Request("p", draw.integers(0, VOCAB, num_tokens).tolist(), params)
    return prompt, torch.from_numpy(draw.normal(0, 1, (num_tokens, HIDDEN)).astype(np.float32))


def check_scores(prompt: Request, hidden: torch.Tensor, head: Head, start: int, scores: list[TokenLogprobs]) -> None:
    assert prompt.params is not None
    assert prompt.params.prompt_logprobs is not None
    logits = hidden.double() @ head.weight.double()
    for position, score in enumerate(scores, start):
        check(
            score,
            plain(logits[position - 1].tolist(), prompt.prompt_token_ids[position], prompt.params.prompt_logprobs),
        )


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 18, 32, 33, 34, 49])
def test_a_whole_prompt_in_slices(num_tokens: int) -> None:
    prompt, hidden = prompt_of(num_tokens)
    head = Head()
    scored = score_prompt(prompt, 0, hidden, head)
    assert (scored.request, scored.start, len(scored.logprobs)) == (prompt, 1, num_tokens - 1)
    check_scores(prompt, hidden, head, 1, scored.logprobs)
    assert max(head.sizes) <= 16
    assert sum(head.sizes) == num_tokens - 1, "a row was scored that no token of the prompt follows"


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 70), st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), max_size=6), st.integers(0, 4))
def test_pieces_that_overlap_give_each_token_once(num_tokens: int, pieces: list[tuple[int, int]], count: int) -> None:
    """As they come after a preemption: some positions again, never a gap; the last piece is all that is left."""
    prompt, hidden = prompt_of(num_tokens, count)
    head = Head()
    found: list[TokenLogprobs] = []
    for back, size in [*pieces, (0, num_tokens)]:
        start = max(prompt.num_scored_tokens - 1 - back, 0)
        scored = score_prompt(prompt, start, hidden[start : start + size], head)
        if scored.logprobs:
            assert scored.start == len(found) + 1
            found += scored.logprobs
            prompt.num_scored_tokens = scored.start + len(scored.logprobs)
    assert len(found) == num_tokens - 1
    assert not prompt.is_scoring
    check_scores(prompt, hidden, head, 1, found)


def test_outputs_behind_the_prompt_are_not_scored() -> None:
    prompt, hidden = prompt_of(20)
    prompt.append_output(3)
    scored = score_prompt(prompt, 0, torch.cat([hidden, hidden[:1]]), Head())
    assert len(scored.logprobs) == 19
    prompt.num_scored_tokens = 20
    assert score_prompt(prompt, 18, hidden[18:], Head()).logprobs == []
