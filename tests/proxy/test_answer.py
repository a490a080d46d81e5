"""Where an answer ends, and that text, tokens and log-probabilities agree, for any tokens in any batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.messages import TokenLogprobs
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import TextTokenizer
from proxy.answer import Answer, AnswerDelta
from proxy.dispatcher import OutputBatch

EOS = 2
STOP_TOKEN = 70
Finish = Literal["stop", "length"]


def run(
    tokenizer: TextTokenizer, ids: list[int], cuts: list[int], stops: list[str], finish: Finish
) -> tuple[list[AnswerDelta], Answer]:
    """Pushes the ids in batches that end at the cuts; the last one carries the finish reason."""
    answer = Answer(
        Detokenizer(tokenizer), stops, end_token_ids=frozenset({EOS}), stop_token_ids=frozenset({STOP_TOKEN})
    )
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    deltas = []
    for start, end in pairwise(edges):
        part = ids[start:end]
        logprobs = [TokenLogprobs(-float(start + i)) for i in range(len(part))]
        deltas.append(answer.push(OutputBatch(part, logprobs or None, finish if end == len(ids) else None)))
        if answer.is_finished:
            break
    return deltas, answer


ids_strategy = st.lists(st.integers(3, 399), min_size=1, max_size=25)
cuts_strategy = st.lists(st.integers(1, 24), max_size=6)
stops_strategy = st.lists(st.sampled_from(["e", "th", "a b", "qu", "\ufffd", "!"]), max_size=3)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=ids_strategy, cuts=cuts_strategy, stops=stops_strategy, ends=st.booleans())
def test_batches_make_no_difference(
    tokenizer: TextTokenizer, ids: list[int], cuts: list[int], stops: list[str], ends: bool
) -> None:
    ids = [i for i in ids if i != STOP_TOKEN] + ([EOS] if ends else [])
    if not ids:
        return
    finish: Finish = "stop" if ends else "length"
    whole, one = run(tokenizer, ids, [], stops, finish)
    parts, many = run(tokenizer, ids, cuts, stops, finish)

    def summary(deltas: list[AnswerDelta], answer: Answer) -> tuple[Any, ...]:
        tokens = [token for delta in deltas for token in delta.tokens]
        last = deltas[-1]
        return "".join(d.text for d in deltas), tokens, last.finish_reason, last.stop_reason, answer.num_tokens

    assert summary(parts, many) == summary(whole, one)
    text, tokens, reason, stop_reason, num_tokens = summary(whole, one)
    assert len(tokens) == num_tokens
    assert [token.logprobs for token in tokens] == [TokenLogprobs(-float(i)) for i in range(num_tokens)]
    assert all(token.start < len(text) for token in tokens if reason == "stop" and stop_reason)
    assert not any(stop in text for stop in stops)
    full = tokenizer.decode([i for i in ids if i != EOS])
    assert full.startswith(text)
    assert text == full or stop_reason in stops


def test_a_stop_token_is_no_part_of_the_answer(tokenizer: TextTokenizer) -> None:
    [delta], answer = run(tokenizer, [60, 61, STOP_TOKEN], [], [], "stop")
    assert [token.token_id for token in delta.tokens] == [60, 61]
    assert (delta.finish_reason, delta.stop_reason, answer.num_tokens) == ("stop", STOP_TOKEN, 2)
    assert delta.token_ids == [60, 61, STOP_TOKEN]


def test_a_stop_string_wins_over_length_at_the_same_token(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("the fox")
    [delta], _ = run(tokenizer, ids, [], ["fox"], "length")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("the ", "stop", "fox")


def test_what_follows_a_stop_string_is_ignored(tokenizer: TextTokenizer) -> None:
    ids = [*tokenizer.encode("the fox"), *tokenizer.encode(" more"), EOS]
    [delta], answer = run(tokenizer, ids, [], ["fox"], "stop")
    assert delta.text == "the "
    assert answer.num_tokens == len(delta.tokens)


def test_a_token_that_is_cut_in_two_is_still_in(tokenizer: TextTokenizer) -> None:
    [fox] = [i for i in range(tokenizer.num_tokens) if tokenizer.piece(i).data == b" fox"]
    [delta], _ = run(tokenizer, [fox], [], ["ox"], "length")
    assert (delta.text, [token.token_id for token in delta.tokens]) == (" f", [fox])
