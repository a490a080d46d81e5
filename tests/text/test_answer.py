"""Where an answer ends, and that text, tokens and log-probabilities agree, for any tokens in any batches."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from common.messages import TokenLogprobs
from common.text.answer import Answer, AnswerDelta, OutputBatch
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import TextTokenizer

EOS = 2
STOP_TOKEN = 70
Finish = Literal["stop", "length"]


@pytest.fixture(scope="session")
def tokenizer(byte_level: TextTokenizer) -> TextTokenizer:
    return byte_level


def run(
    tokenizer: TextTokenizer,
    ids: list[int],
    cuts: list[int],
    stops: list[str],
    finish: Finish,
    *,
    includes_stop: bool = False,
    skip_special_tokens: bool = True,
) -> tuple[list[AnswerDelta], Answer]:
    """Pushes the ids in batches that end at the cuts; the last one carries the finish reason."""
    answer = Answer(
        Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens),
        stops,
        end_token_ids=frozenset({EOS}),
        stop_token_ids=frozenset({STOP_TOKEN}),
        includes_stop=includes_stop,
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
@given(ids=ids_strategy, cuts=cuts_strategy, stops=stops_strategy, ends=st.booleans(), includes=st.booleans())
def test_batches_make_no_difference(
    tokenizer: TextTokenizer, ids: list[int], cuts: list[int], stops: list[str], ends: bool, includes: bool
) -> None:
    ids = [i for i in ids if i != STOP_TOKEN] + ([EOS] if ends else [])
    if not ids:
        return
    finish: Finish = "stop" if ends else "length"
    whole, one = run(tokenizer, ids, [], stops, finish, includes_stop=includes)
    parts, many = run(tokenizer, ids, cuts, stops, finish, includes_stop=includes)

    def summary(deltas: list[AnswerDelta], answer: Answer) -> tuple[Any, ...]:
        tokens = [token for delta in deltas for token in delta.tokens]
        last = deltas[-1]
        return "".join(d.text for d in deltas), tokens, last.finish_reason, last.stop_reason, answer.num_tokens

    assert summary(parts, many) == summary(whole, one)
    text, tokens, _, stop_reason, num_tokens = summary(whole, one)
    assert len(tokens) == num_tokens
    assert [token.logprobs for token in tokens] == [TokenLogprobs(-float(i)) for i in range(num_tokens)]
    full = tokenizer.decode([i for i in ids if i != EOS])
    assert full.startswith(text)
    assert text == full or stop_reason in stops
    if stop_reason in stops:
        assert includes == text.endswith(stop_reason)
        visible = [token.token_id for token in tokens if tokenizer.piece(token.token_id).data]
        assert visible == tokens_of(tokenizer, ids, len(text))  # where one without text belongs is open
    assert not any(stop in text[: -len(stop_reason) if includes and stop_reason else None] for stop in stops)


def trimmed_ids(delta: AnswerDelta) -> list[int]:
    return [token.token_id for token in delta.trimmed]


def tokens_of(tokenizer: TextTokenizer, ids: list[int], num_characters: int) -> list[int]:
    """Those that have a byte of the first characters of the text."""
    data = b"".join(tokenizer.piece(i).data for i in ids)
    num_bytes = 0
    for _ in range(num_characters):
        try:
            num_bytes += len(data[num_bytes:].decode()[0].encode())
        except UnicodeDecodeError as error:
            num_bytes += error.end if error.start == 0 else len(error.object[: error.start].decode()[0].encode())
    lengths = accumulate((len(tokenizer.piece(i).data) for i in ids), initial=0)
    visible = (i for i in zip(ids, lengths, strict=False) if tokenizer.piece(i[0]).data)
    return [token_id for token_id, place in visible if place < num_bytes]


def test_a_stop_string_right_after_a_broken_character(tokenizer: TextTokenizer) -> None:
    """The broken one becomes text only when the next token has come; that token is the stop string's all the same."""
    [broken] = [i for i in range(tokenizer.num_tokens) if tokenizer.piece(i).data == b"\xe6"]
    [a] = [i for i in range(tokenizer.num_tokens) if tokenizer.piece(i).data == b"a"]
    deltas, answer = run(tokenizer, [broken, a, a], [1, 2], ["a"], "length")
    assert "".join(delta.text for delta in deltas) == "\ufffd"
    assert [token.token_id for delta in deltas for token in delta.tokens] == [broken]
    assert answer.num_tokens == 1
    deltas, _ = run(tokenizer, [broken, a, a], [1, 2], ["a"], "length", includes_stop=True)
    assert [(token.token_id, token.start) for delta in deltas for token in delta.tokens] == [(broken, 0), (a, 1)]


def test_a_stop_string_right_after_byte_tokens() -> None:
    """SentencePiece's byte tokens become text when their run has ended."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    model = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    run_ids = list("日".encode())
    deltas, answer = run(TextTokenizer(model), [*run_ids, 256, 256], [1, 2, 3, 4], ["a"], "length")
    assert [delta.text for delta in deltas] == ["", "", "", "日"]
    assert [token.token_id for delta in deltas for token in delta.tokens] == run_ids
    assert answer.num_tokens == 3
    assert [token.token_id for token in deltas[-1].trimmed] == [256]


def test_a_stop_string_of_what_was_held_to_the_end(tokenizer: TextTokenizer) -> None:
    """Bytes that begin a character become U+FFFD when the end token comes, and that is the stop string."""
    [broken] = [i for i in range(tokenizer.num_tokens) if tokenizer.piece(i).data == b"\xe6"]
    [a] = [i for i in range(tokenizer.num_tokens) if tokenizer.piece(i).data == b"a"]
    [delta], answer = run(tokenizer, [a, broken, EOS], [], ["\ufffd"], "stop")
    assert (delta.text, delta.stop_reason, answer.num_tokens) == ("a", "\ufffd", 1)
    assert delta.token_ids == [a, broken, EOS]
    [delta], answer = run(tokenizer, [a, broken, EOS], [], ["\ufffd"], "stop", includes_stop=True)
    assert (delta.text, delta.stop_reason, answer.num_tokens) == ("a\ufffd", "\ufffd", 2)


def test_an_included_stop_token_is_the_last_part_if_it_shows(tokenizer: TextTokenizer) -> None:
    """As in vLLM, which decodes the token that ended the answer then; text and tokens still agree."""
    ids = tokenizer.encode("the fox")
    shown = tokenizer.token_text(STOP_TOKEN)
    [delta], answer = run(tokenizer, [*ids, STOP_TOKEN], [], [], "stop", includes_stop=True)
    assert (delta.text, delta.stop_reason) == (f"the fox{shown}", STOP_TOKEN)
    assert (answer.num_tokens, trimmed_ids(delta)) == (len(ids) + 1, [])
    [delta], answer = run(tokenizer, [*ids, EOS], [], [], "stop", includes_stop=True)
    assert (delta.text, answer.num_tokens, trimmed_ids(delta)) == ("the fox", len(ids), [EOS])
    [delta], answer = run(tokenizer, [*ids, EOS], [], [], "stop", includes_stop=True, skip_special_tokens=False)
    assert (delta.text, answer.num_tokens, trimmed_ids(delta)) == ("the fox<|im_end|>", len(ids) + 1, [])


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
