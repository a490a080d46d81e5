"""Joined deltas are the full decode, for any ids; parts of characters are held back and released once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.text.detokenizer import Detokenizer, incomplete_tail
from common.text.tokenizer import TextTokenizer

FAST = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def deltas(tokenizer: TextTokenizer, ids: Sequence[int], **options: object) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.finish()]


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    by_byte = {tokenizer.piece(i).data: i for i in reversed(range(tokenizer.num_tokens))}
    return [by_byte[bytes([byte])] for byte in data]


def fallback_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    return [3 + byte for byte in data]


@FAST
@given(data=st.data(), skip=st.booleans())
def test_byte_level_equals_full_decode(byte_level: TextTokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.num_tokens + 3), max_size=40))
    joined = "".join(deltas(byte_level, ids, skip_special_tokens=skip))
    assert joined == byte_level.decode(ids, skip_special_tokens=skip)


@FAST
@given(text=st.text(max_size=30), cut=st.integers(0, 3))
def test_text_in_single_bytes(byte_level: TextTokenizer, text: str, cut: int) -> None:
    data = text.encode()
    data = data[: len(data) - cut]
    assert "".join(deltas(byte_level, byte_ids(byte_level, data))) == data.decode("utf-8", "replace")


@FAST
@given(data=st.data(), skip=st.booleans())
def test_byte_fallback_equals_full_decode(byte_fallback: TextTokenizer, data: st.DataObject, skip: bool) -> None:
    common_bytes = st.sampled_from(fallback_ids(byte_fallback, "é日🙂 a".encode() + b"\x85\xff"))
    ids = data.draw(st.lists(common_bytes | st.integers(0, byte_fallback.num_tokens + 3), max_size=30))
    joined = "".join(deltas(byte_fallback, ids, skip_special_tokens=skip))
    assert joined == byte_fallback.decode(ids, skip_special_tokens=skip)


def test_a_character_is_sent_when_it_is_complete(byte_level: TextTokenizer) -> None:
    assert deltas(byte_level, byte_ids(byte_level, "a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_an_invalid_byte_is_replaced_once_and_the_text_goes_on(byte_level: TextTokenizer) -> None:
    """S-03."""
    ids = byte_ids(byte_level, b"ok \x85 done")
    assert "".join(deltas(byte_level, ids)) == "ok \ufffd done"


def test_a_held_tail_is_released_at_the_end(byte_level: TextTokenizer) -> None:
    assert deltas(byte_level, byte_ids(byte_level, "é".encode()[:1])) == ["", "\ufffd"]


def test_ids_without_a_token_are_empty(byte_level: TextTokenizer) -> None:
    """L-11."""
    assert deltas(byte_level, [byte_level.num_tokens + 100, 2**31]) == ["", "", ""]


@pytest.mark.parametrize("text", ["é", "日", "🙂"])
def test_a_prompt_that_ends_inside_a_character(byte_level: TextTokenizer, text: str) -> None:
    """S-02: the answer may complete the character, and repeats nothing of the prompt."""
    data = text.encode()
    prompt = byte_level.encode("abc ") + byte_ids(byte_level, data[:-1])
    completed = deltas(byte_level, byte_ids(byte_level, data[-1:] + b"!"), prompt_token_ids=prompt)
    assert completed == [text, "!", ""]
    not_completed = deltas(byte_level, byte_ids(byte_level, b"no"), prompt_token_ids=prompt)
    assert "".join(not_completed) == "no"
    assert "".join(deltas(byte_level, [], prompt_token_ids=prompt)) == ""


def test_a_dangling_character_completed_in_two_steps(byte_level: TextTokenizer) -> None:
    data = "🙂".encode()
    prompt = byte_ids(byte_level, data[:2])
    assert deltas(byte_level, byte_ids(byte_level, data[2:]), prompt_token_ids=prompt) == ["", "🙂", ""]
    half = deltas(byte_level, byte_ids(byte_level, data[2:3]), prompt_token_ids=prompt)
    assert "".join(half) == "\ufffd"


def test_byte_fallback_prompt_that_ends_inside_a_character(byte_fallback: TextTokenizer) -> None:
    data = "é".encode()
    prompt = fallback_ids(byte_fallback, data[:1])
    after = [*fallback_ids(byte_fallback, data[1:]), byte_fallback.encode("a")[-1]]
    assert "".join(deltas(byte_fallback, after, prompt_token_ids=prompt)) == "éa"


def test_leading_space_is_stripped_only_when_the_answer_stands_alone(byte_fallback: TextTokenizer) -> None:
    the = byte_fallback.encode("▁the")[-1]
    ids = [next(i for i in range(byte_fallback.num_tokens) if byte_fallback.piece(i).data == b" the")]
    assert the is not None
    assert "".join(deltas(byte_fallback, ids)) == "the"
    assert "".join(deltas(byte_fallback, ids, prompt_token_ids=ids)) == " the"


@given(st.binary(max_size=8))
def test_incomplete_tail_is_what_could_still_become_a_character(data: bytes) -> None:
    tail = incomplete_tail(data)
    assert data.endswith(tail)
    assert len(tail) <= 3
    if tail:
        continuations = [b"\x80", b"\xa0", b"\x90", b"\x80\x80", b"\xa0\x80", b"\x90\x80", b"\x80" * 3, b"\x90\x80\x80"]
        assert any(_decodes(tail + more) for more in continuations)


def _decodes(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
