"""What parameters change in the logits: against a plain reference, alone, beside strangers, and what never happens."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.request import Request
from common.runner import sampler as sampler_module
from common.runner.logits import LogitRules, RuledRow, adjust_logits, pack_bits
from common.runner.sampler import Sampler, SamplingRow
from common.sampling_params import SamplingParams
from tests.runner.plain_numbers import plain_exponentials

VOCAB = 41  # no multiple of 8 or 32
ids = st.integers(0, VOCAB - 1)
# Exact in float32 and few, so that tokens tie.
numbers = st.sampled_from([-4.0, -1.5, 0.0, 0.5, 1.0, 3.0])
logits_lists = st.lists(numbers, min_size=VOCAB, max_size=VOCAB)


@st.composite
def requests(draw: st.DrawFn, greedy: bool | None = None) -> Request:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])) if greedy is None else float(not greedy),
        top_k=draw(st.sampled_from([0, 2, 7])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.25])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 2.0, 100.0]), max_size=4)),
        min_tokens=draw(st.integers(0, 6)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=VOCAB).map(tuple)),
        bad_words_token_ids=tuple(draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)))),
        seed=draw(st.integers(0, 2**40)),
    )
    outputs = draw(st.lists(st.integers(0, 6), max_size=12))
    stops = frozenset(draw(st.lists(ids, max_size=3)))
    return Request("r", draw(st.lists(ids, min_size=1, max_size=20)), params, outputs, stops)


def row_of(request: Request, vocab_size: int = VOCAB) -> SamplingRow:
    assert request.params is not None
    outputs = request.output_token_ids
    rules = LogitRules.of(request, vocab_size)
    return SamplingRow(request.params, len(outputs), rules=rules, output_token_ids=outputs)


def adjusted(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """One row."""
    rules = LogitRules.of(request, len(logits))
    changed = logits.clone().unsqueeze(0)
    adjust_logits(changed, [] if rules is None else [RuledRow(0, rules, request.output_token_ids)])
    return changed[0]


def plain_adjusted(logits: list[float], request: Request) -> list[float]:
    """As docs/sampling.md says, one token after the other, in Python's floats."""
    p, outputs = request.params, request.output_token_ids
    assert p is not None
    found = list(logits)
    bad = {w[-1] for w in p.bad_words_token_ids if len(outputs) >= len(w) - 1 and [*outputs, w[-1]][-len(w) :] == [*w]}
    everything = set(range(len(logits)))
    masks = [
        everything if p.allowed_token_ids is None else set(p.allowed_token_ids),
        everything - bad,
        everything - request.stop_token_ids if len(outputs) < p.min_tokens else everything,
    ]
    kept = everything
    for mask in masks:
        kept = kept & mask or kept
    found = [x if i in kept else -math.inf for i, x in enumerate(found)]
    for i, bias in p.logit_bias.items():
        found[i] += bias
    for i in {*request.prompt_token_ids, *outputs}:
        found[i] = found[i] / p.repetition_penalty if found[i] > 0 else found[i] * p.repetition_penalty
    for i, count in Counter(outputs).items():
        found[i] -= p.frequency_penalty * count + p.presence_penalty
    return found


def plain_draw(logits: list[float], row: SamplingRow) -> int:
    p = row.params
    order = sorted(range(len(logits)), key=lambda i: -logits[i])  # stable: equal ones by id
    if p.is_greedy:
        return order[0]
    mass = [math.exp((x - logits[order[0]]) / p.temperature) for x in logits]
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        wanted, before = p.top_p * sum(mass[i] for i in order), 0.0
        for count, i in enumerate(order):
            if count and before >= wanted:
                order = order[:count]
                break
            before += mass[i]
    order = [i for i in order if mass[i] >= p.min_p]
    numbers = plain_exponentials(row, len(logits))
    return min((i for i in order if mass[i] > 0), key=lambda i: numbers[i] / mass[i])


@settings(max_examples=300, deadline=None)
@given(logits_lists, requests())
def test_logits_change_as_the_definitions_say(logits: list[float], request: Request) -> None:
    assert adjusted(torch.tensor(logits), request).tolist() == plain_adjusted(logits, request)


@settings(max_examples=300, deadline=None)
@given(logits_lists, requests())
def test_the_whole_way_draws_what_the_definitions_say(logits: list[float], request: Request) -> None:
    row = row_of(request)
    [token] = Sampler()(torch.tensor([logits]), [row])
    assert token.token_id == plain_draw(plain_adjusted(logits, request), row)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), requests(), st.lists(requests(), min_size=32, max_size=32))
def test_a_row_is_the_same_alone_and_at_every_slot(seed: int, request: Request, strangers: list[Request]) -> None:
    logits = torch.randn(33, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    row, others = row_of(request), [row_of(stranger) for stranger in strangers]
    [alone] = Sampler()(logits[:1], [row])
    for slot in (0, 1, 7, 8, 15, 16, 31, 32):
        beside = torch.cat([logits[1 : slot + 1], logits[:1], logits[slot + 1 :]])
        assert Sampler()(beside, [*others[:slot], row, *others[slot:]])[slot] == alone


def test_chi_square_of_everything_together() -> None:
    """20,000 draws with all parameters on follow the distribution that plain arithmetic gives."""
    logits = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 3.0, 0.25]
    params = SamplingParams(
        temperature=0.8, top_k=6, top_p=0.95, min_p=0.02, seed=5, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.25, logit_bias={4: 1.0, 7: 2.5}, min_tokens=9, bad_words_token_ids=((1, 9), (5,)),
        allowed_token_ids=(0, 1, 2, 3, 4, 5, 7, 8, 9),
    )  # fmt: skip
    request = Request("r", [0, 6, 3], params, [2, 2, 0, 1], frozenset({8}))
    changed = plain_adjusted(logits, request)
    assert {changed[i] for i in (5, 6, 8, 9)} == {-math.inf}
    order = sorted(range(10), key=lambda i: -changed[i])[:6]
    mass = {i: math.exp((changed[i] - changed[order[0]]) / 0.8) for i in order}
    kept = [i for n, i in enumerate(order) if sum(mass[j] for j in order[:n]) < 0.95 * sum(mass.values())]
    kept = [i for i in kept if mass[i] >= 0.02]
    total, count = sum(mass[i] for i in kept), 20_000
    rules, outputs = LogitRules.of(request, 10), request.output_token_ids
    rows = [SamplingRow(params, i, rules=rules, output_token_ids=outputs) for i in range(count)]
    found = Counter(token.token_id for token in Sampler()(torch.tensor([logits]).repeat(count, 1), rows))
    assert set(found) == set(kept)
    assert len(kept) >= 4
    chi_square = sum((found[i] - count * mass[i] / total) ** 2 / (count * mass[i] / total) for i in kept)
    assert chi_square < 20.5  # p = 0.001 with 5 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), requests(greedy=True))
def test_greedy_is_the_limit_of_small_temperatures(seed: int, request: Request) -> None:
    """Report M-04, with everything else on."""
    assert request.params is not None
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 8
    [greedy] = Sampler()(logits, [row_of(request)])
    for temperature in (1e-5, 1e-4, 1e-30):
        fields = {name: getattr(request.params, name) for name in SamplingParams.__struct_fields__}
        params = SamplingParams(**{**fields, "temperature": temperature})
        small = Request("r", request.prompt_token_ids, params, request.output_token_ids, request.stop_token_ids)
        assert Sampler()(logits, [row_of(small)]) == [greedy]


def test_m07_a_neighbour_with_penalties_and_a_long_prompt_changes_nothing() -> None:
    """Padding of shorter rows was counted, so that an answer depended on who else was in the batch."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = logits[0].max() + 0.01  # padding would be token 0
    plain = Request("a", [3], SamplingParams(temperature=0.0))
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3)
    penalized = Request("b", list(range(VOCAB)) * 20, params, [0, 0, 5])
    rows = [row_of(plain), row_of(penalized)]
    alone = [Sampler()(logits[i : i + 1], rows[i : i + 1])[0] for i in range(2)]
    assert Sampler()(logits, rows) == alone
    assert alone[0].token_id == 0
    short = row_of(Request("c", [3], params, [0]))
    assert Sampler()(logits.flip(0), [rows[1], short])[1] == Sampler()(logits[:1], [short])[0]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_m08_penalties_of_outputs_leave_the_prompt_alone(name: str) -> None:
    """Words of the prompt, which the model had not said, were penalised."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(**{name: 2.0})
    assert torch.equal(adjusted(logits, Request("r", [7] * 30, params)), logits)
    after = adjusted(logits, Request("r", [7] * 30, params, [9]))
    assert torch.nonzero(after != logits).flatten().tolist() == [9]
    repeated = adjusted(logits.abs() + 1, Request("r", [7] * 30, SamplingParams(repetition_penalty=2.0), [9]))
    assert torch.nonzero(repeated != logits.abs() + 1).flatten().tolist() == [7, 9]


@pytest.mark.parametrize("end", [2, 11, 30])
def test_m09_min_tokens_holds_back_every_end_token(end: int) -> None:
    """A model with two end tokens and a stop id of the user: exactly four other tokens, then the end."""
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=10, stop_token_ids=(30,), logit_bias={end: 100.0})
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    request = Request("r", [1], params, stop_token_ids=frozenset({2, 11, 30}))
    for _ in range(5):
        request.append_output(Sampler()(logits, [row_of(request)])[0].token_id)
    assert set(request.output_token_ids[:4]).isdisjoint({2, 11, 30})
    assert request.output_token_ids[4] == end


def test_m11_ids_beyond_the_vocabulary_touch_no_neighbour() -> None:
    """Used as indices, they wrote into the next row. (Proxy and decode node refuse them before.)"""
    params = SamplingParams(
        temperature=0.0, min_tokens=3, logit_bias={VOCAB: 100.0, VOCAB + 5: -100.0, 10**9: 5.0},
        allowed_token_ids=(3, VOCAB + 1), bad_words_token_ids=((VOCAB + 2,), (10**9, 4)),
    )  # fmt: skip
    hostile = Request("h", [5], params, stop_token_ids=frozenset({VOCAB + 3, 2**32 - 1}))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    plain = row_of(Request("p", [5], SamplingParams(temperature=0.0)))
    before = logits.clone()
    found = [token.token_id for token in Sampler()(logits, [plain, row_of(hostile), plain])]
    assert found == [int(before[0].argmax()), 3, int(before[2].argmax())]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"allowed_token_ids": (5,), "bad_words_token_ids": ((5,),)}, {5}),
        ({"allowed_token_ids": (2,), "min_tokens": 4}, {2}),
        ({"allowed_token_ids": (5, 2), "min_tokens": 4, "bad_words_token_ids": ((5,),)}, {2}),
        ({"bad_words_token_ids": tuple((i,) for i in range(VOCAB))}, set(range(VOCAB))),
    ],
)
def test_a_mask_that_would_leave_nothing_is_not_applied(temperature: float, fields: Any, right: set[int]) -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(temperature=temperature, seed=1, logprobs=2, **fields)
    rows = [row_of(Request("r", [1], params, stop_token_ids=frozenset({2})))] * len(logits)
    for token in Sampler()(logits, rows):
        assert token.token_id in right
        assert token.logprobs is not None
        assert math.isfinite(token.logprobs.logprob)


def test_few_allowed_tokens_and_a_large_top_k_rank_no_more_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less than top_k tokens left, the rest of the vocabulary has no mass and is not sorted."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(7))
    params = SamplingParams(seed=3, top_k=400, allowed_token_ids=(17, 300, 4999))
    row = row_of(Request("r", [1], params), 5000)
    monkeypatch.setattr(sampler_module, "rank_all_kept", None)  # a call would fail
    assert Sampler()(logits, [row])[0].token_id in (17, 300, 4999)


def test_logprobs_are_of_the_raw_logits_whatever_changes_them() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={9: 100.0}, allowed_token_ids=(9, 10))
    [token] = Sampler()(logits, [row_of(Request("r", [1], params))])
    assert token.token_id == 9
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 9]))
    assert token.logprobs.top_token_ids == logits[0].topk(3).indices.tolist()


def test_rows_that_ask_for_nothing_have_no_rules() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, logprobs=3)):
        assert LogitRules.of(Request("r", [1], params), VOCAB) is None


@given(st.sets(ids))
def test_bits_are_packed_lowest_first(token_ids: set[int]) -> None:

    packed = pack_bits(np.array(sorted(token_ids), np.int64), VOCAB)
    assert packed.dtype == np.int32
    assert len(packed) == 2
    assert {i for i in range(64) if int(packed[i // 32]) >> i % 32 & 1} == token_ids
