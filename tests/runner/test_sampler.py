"""The sampler: filters against a plain reference, distributions by chi-square, seeds independent of the batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.runner import sampler as sampler_module
from common.runner.random_numbers import draw_key, exponentials
from common.runner.ranking import highest
from common.runner.sampler import Sampler, SamplingRow
from common.sampling_params import SamplingParams
from tests.runner.plain_numbers import plain_exponentials

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(-1, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
# A few levels, so that many tokens tie; differences are exact in float32.
tied_logits = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 1.0, 2.0]), min_size=13, max_size=40)


def plain_draw(logits: list[float], row: SamplingRow) -> int:
    """As the parameters' definitions say, one token after the other, in Python's floats."""
    p = row.params
    if p.temperature == 0.0 or p.top_k == 1:
        return max(range(len(logits)), key=lambda i: logits[i])
    mass = [math.exp((x - max(logits)) / p.temperature) for x in logits]
    order = list(range(len(logits)))
    if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0:
        order.sort(key=lambda i: -mass[i])  # stable: equal ones by id
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        wanted, kept = p.top_p * sum(mass[i] for i in order), []
        for i in order:
            if kept and sum(mass[j] for j in kept) >= wanted:
                break
            kept.append(i)
        order = kept
    order = [i for i in order if mass[i] >= p.min_p]
    numbers = plain_exponentials(row, len(logits))
    return min((i for i in order if mass[i] > 0), key=lambda i: numbers[i] / mass[i])


def draw(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return [token.token_id for token in Sampler()(logits, rows)]


@settings(max_examples=300, deadline=None)
@given(tied_logits, params, st.integers(0, 100))
def test_draws_what_the_definitions_say(logits: list[float], p: SamplingParams, index: int) -> None:
    row = SamplingRow(p, index)
    assert draw(torch.tensor([logits]), [row]) == [plain_draw(logits, row)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.lists(params, min_size=2, max_size=8), st.booleans())
def test_a_row_does_not_depend_on_the_others(seed: int, rows: list[SamplingParams], has_ties: bool) -> None:
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if has_ties else logits
    sampling = [SamplingRow(p, i) for i, p in enumerate(rows)]
    assert draw(logits, sampling) == [draw(logits[i : i + 1], sampling[i : i + 1])[0] for i in range(len(rows))]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.lists(params, min_size=1, max_size=5), st.booleans())
def test_how_many_tokens_are_ranked_does_not_change_the_draw(
    seed: int, rows: list[SamplingParams], has_ties: bool
) -> None:
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if has_ties else logits
    sampling = [SamplingRow(p, i) for i, p in enumerate(rows)]
    found = []
    for width in (4, 32, 256, 300):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_module, "_RANKED_WIDTH", width)
            found.append(draw(logits, sampling))
    assert found[0] == found[1] == found[2] == found[3]


def test_min_p_takes_nothing_from_the_sum_that_top_p_is_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the top 6 two are likely enough for min_p, and both together are what top_p keeps of all six."""
    logits = torch.tensor([[-0.17, 0.0, -0.85, -0.96, -0.98, -1.0, -1.2, -1.3, -1.4]])
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_k=6, top_p=0.3, min_p=0.5, seed=i), 1) for i in range(20)]
    monkeypatch.setattr(sampler_module, "_RANKED_WIDTH", 4)
    found = [draw(logits, [row])[0] for row in rows]
    assert found == [plain_draw(logits[0].tolist(), row) for row in rows]
    assert set(found) == {0, 1}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 8, 33, 64]), st.integers(1000, 1020), st.booleans())
def test_the_highest_are_found_in_any_vocabulary(seed: int, width: int, vocab_size: int, has_ties: bool) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if has_ties else logits
    found = highest(logits, width)
    assert all(len(set(row)) == width for row in found.tolist())
    assert torch.equal(logits.gather(1, found).sort(descending=True).values, logits.topk(width).values)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_draws_follow_the_distribution(filters: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    count = 20_000
    settings_ = SamplingParams(seed=3, **filters)
    rows = [SamplingRow(settings_, i) for i in range(count)]
    found = Counter(draw(logits.expand(count, -1).clone(), rows))
    assert sorted(found) == kept
    expected = (logits[kept] / settings_.temperature).softmax(-1) * count
    chi_square = sum((found[i] - float(e)) ** 2 / float(e) for i, e in zip(kept, expected, strict=True))
    assert chi_square < 20.5  # p = 0.001 with 5 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    """Report M-04: scaled in half precision, such logits overflowed to infinity."""
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)) * 8).to(dtype)
    logits[:, 17] = logits.amax(-1) + 1
    rows = [SamplingRow(SamplingParams(temperature=temperature, seed=i), i) for i in range(4)]
    assert draw(logits.float(), rows) == [17] * 4


def test_a_temperature_that_float32_rounds_to_zero_is_greedy() -> None:
    rows = [SamplingRow(SamplingParams(temperature=1e-300, seed=i), i) for i in range(5)]
    assert draw(torch.tensor([[0.0, 3.0, 2.0, -1.0]]).expand(5, -1).clone(), rows) == [1] * 5


def test_ids_out_of_range_in_the_parameters_touch_no_logits() -> None:
    """Report M-11: such ids were used as indices into the batch's logits."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, stop_token_ids=(10**9, 2**32 - 1)), 0),
        SamplingRow(SamplingParams(temperature=0.0), 0),
    ]
    assert draw(logits, rows) == before.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits_whatever_the_row_samples_with() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, logprobs=2), 0),
        SamplingRow(SamplingParams(temperature=5.0, seed=9, top_k=3, logprobs=0), 0),
        SamplingRow(SamplingParams(temperature=1.0, seed=9), 0),
    ]
    first, second, third = Sampler()(logits, rows)
    raw = logits.log_softmax(-1)
    assert first.token_id == int(logits[0].argmax())
    assert first.logprobs is not None
    assert first.logprobs.top_token_ids == logits[0].topk(2).indices.tolist()
    assert first.logprobs.top_logprobs == pytest.approx(raw[0].topk(2).values.tolist())
    assert first.logprobs.logprob == pytest.approx(float(raw[0, first.token_id]))
    assert second.logprobs is not None
    assert second.logprobs.logprob == pytest.approx(float(raw[1, second.token_id]))
    assert second.logprobs.top_token_ids == []
    assert third.logprobs is None


def test_logprobs_are_finite_even_for_logits_that_are_not() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("nan")] * 3])
    for token in Sampler()(logits, [SamplingRow(SamplingParams(temperature=0.0, logprobs=20), 0)] * 2):
        assert token.logprobs is not None
        assert all(math.isfinite(x) for x in [token.logprobs.logprob, *token.logprobs.top_logprobs])
        assert len(token.logprobs.top_token_ids) == 3  # no more than there are


@pytest.mark.parametrize("fields", [{}, {"top_k": 300}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary(
    fields: dict[str, float], broken: float
) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(9))
    logits[0] = broken
    logits[1, 500] = broken
    rows = [SamplingRow(SamplingParams(seed=i, **fields), 0) for i in range(3)]
    found = draw(logits, rows)
    assert all(0 <= token_id < 1000 for token_id in found)
    assert found[2] == draw(logits[2:], rows[2:])[0]


def test_numbers_are_a_pure_function_with_pinned_values() -> None:
    """Other values here would change every seeded answer of every user."""
    assert draw_key(0, 0, 0) == 0xFBE988335F36C931
    assert draw_key(-1, 3, 70) == 0xE0FB08641B9E05F3
    assert len({draw_key(s, c, i) for s in range(8) for c in range(8) for i in range(8)}) == 512
    assert exponentials([draw_key(1, 0, 0)], 3).tolist() == [pytest.approx([0.18433286, 0.96785545, 0.013686946])]
    keys = [draw_key(s, 0, i) for s in (-1, 0, 2**63 - 1, -(2**63)) for i in range(5)]
    many = exponentials(keys, 5000)
    assert (many > 0).all()
    picked = torch.tensor([[4999, 0, 17]] * len(keys))
    assert torch.equal(exponentials(keys, picked), many.gather(1, picked))
    assert exponentials(keys[:1], 5000).equal(many[:1])


def test_numbers_are_exponential_and_unrelated() -> None:
    """Along token ids, along outputs and between the two."""
    many = exponentials([draw_key(5, 0, i) for i in range(400)], 500).double()
    for axis in (0, 1):
        assert ((many.mean(axis) - 1).abs() < 0.3).all()
    quantiles = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    found = torch.stack([(many < -(1 - q).log()).double().mean() for q in quantiles])
    assert torch.allclose(found, quantiles, atol=0.003)
    centred = many - 1
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1))):
        assert abs(float((centred * other).mean())) < 0.01


def test_logits_that_differ_in_their_last_bits_draw_the_same_token() -> None:
    """Preemption, another batch or another node rounds KV otherwise; a tail token's neighbour was drawn then."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 20_000, generator=generator) * 2
    noisy = logits + torch.randn(logits.shape, generator=generator) * 3e-5
    for fields in ({}, {"temperature": 1.5}, {"top_k": 5000}, {"min_p": 1e-4}):
        rows = [SamplingRow(SamplingParams(seed=i, **fields), 7) for i in range(64)]
        assert draw(logits, rows) == draw(noisy, rows)


def test_a_row_of_a_beam_is_given_its_candidates_whatever_it_would_draw_with() -> None:
    """Also more of them than the parameters ask for, or than there are; others of its kind draw as ever."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(9)).expand(4, -1)
    hot = SamplingParams(temperature=2.0, seed=8, logprobs=1)
    rows = [SamplingRow(hot, 0), SamplingRow(hot, 0, num_candidates=5), SamplingRow(hot, 0, num_candidates=50)]
    drawn, few, every, plain = Sampler()(logits, [*rows, SamplingRow(SamplingParams(), 0, num_candidates=2)])
    ranking = logits[0].argsort(descending=True).tolist()
    assert drawn.token_id != ranking[0]
    assert few.token_id == every.token_id == plain.token_id == ranking[0]
    for token, count in ((drawn, 1), (few, 5), (every, 40), (plain, 2)):
        assert token.logprobs is not None
        assert token.logprobs.top_token_ids == ranking[:count]
