"""Joined deltas are the full decode, for any ids; parts of characters are held back and released once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.text.detokenizer import Decoded, Detokenizer, incomplete_tail
from common.text.tokenizer import TextTokenizer

FAST = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def deltas(tokenizer: TextTokenizer, ids: Sequence[int], **options: object) -> list[str]:
    return [decoded.text for decoded in decode(tokenizer, ids, **options)]


def decode(tokenizer: TextTokenizer, ids: Sequence[int], **options: object) -> list[Decoded]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.finish()]


def starts(tokenizer: TextTokenizer, ids: Sequence[int], **options: object) -> list[int]:
    """Of each token, by the end of the text."""
    found = [start for decoded in decode(tokenizer, ids, **options) for start in decoded.starts]
    assert len(found) == len(ids)
    assert found == sorted(found)
    return found


def characters(data: bytes) -> list[int]:
    """Of each byte, the number of the character it is in; a maximal invalid part is one."""
    numbers: list[int] = []
    while (at := len(numbers)) < len(data):
        try:
            length = len(data[at:].decode()[0].encode())
        except UnicodeDecodeError as error:
            length = error.end if error.start == 0 else len(data[at : at + error.start].decode()[0].encode())
        numbers += [numbers[-1] + 1 if numbers else 0] * length
    return numbers


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    by_byte = {tokenizer.piece(i).data: i for i in reversed(range(tokenizer.num_tokens))}
    return [by_byte[bytes([byte])] for byte in data]


def fallback_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


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
@given(data=st.binary(max_size=12) | st.text(max_size=4).map(str.encode), cuts=st.lists(st.integers(0, 12)))
@example(data=b"\xed\xa0\x80", cuts=[])  # a surrogate: three characters that are none
def test_byte_level_starts(byte_level: TextTokenizer, data: bytes, cuts: list[int]) -> None:
    """Single bytes, and between them tokens of several bytes where the vocabulary has them."""
    whole = set(cuts)
    by_data = {byte_level.piece(i).data: i for i in reversed(range(byte_level.num_tokens))}
    ids, places, at = [], [], 0
    while at < len(data):
        length = next(n for n in (4, 3, 2, 1) if n == 1 or (at in whole and data[at : at + n] in by_data))
        ids.append(by_data[data[at : at + length]])
        places.append(at)
        at += length
    numbers = characters(data)
    assert starts(byte_level, ids) == [numbers[place] for place in places]


@FAST
@given(
    data=st.text(min_size=1, max_size=2).map(str.encode) | st.binary(min_size=1, max_size=3),
    cut=st.integers(1, 3),
    after=st.binary(max_size=4),
)
def test_starts_after_a_prompt_that_ends_inside_a_character(
    byte_level: TextTokenizer, data: bytes, cut: int, after: bytes
) -> None:
    prompt, answer = data[:-cut], data[len(data[:-cut]) :] + after
    dangling = incomplete_tail(prompt)
    is_completed = bool(dangling) and any(is_character((dangling + answer)[:n]) for n in range(len(dangling) + 1, 5))
    numbers = characters(dangling + answer)[len(dangling) :] if is_completed else characters(answer)
    assert starts(byte_level, byte_ids(byte_level, answer), prompt_token_ids=byte_ids(byte_level, prompt)) == numbers


STYLES = ["llama", "gemma", "two spaces", "unigram", "unigram, bytes after spaces", "unigram, bytes before spaces"]
STYLES += ["bytes before spaces, nothing stripped"]


@pytest.mark.parametrize("style", STYLES)
@FAST
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_equals_full_decode(
    sentencepiece_styles: dict[str, TextTokenizer], style: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = sentencepiece_styles[style]
    byte = st.sampled_from(fallback_ids(tokenizer, "é日🙂 a▁".encode() + b"\x85\xff"))
    character = st.sampled_from([fallback_ids(tokenizer, c.encode()) for c in "é日🙂▁ a"])
    one = st.lists(byte | st.integers(0, 2) | st.integers(259, tokenizer.num_tokens + 3), max_size=3)
    parts = data.draw(st.lists(character | one, max_size=12))
    ids = [token_id for part in parts for token_id in part]
    joined = "".join(deltas(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    for i, start in enumerate(starts(tokenizer, ids, skip_special_tokens=skip)):
        shows = Detokenizer(tokenizer, skip_special_tokens=skip).shows(ids[i])
        if shows and not (tokenizer.piece(ids[i]).is_byte and tokenizer.rules.has_byte_fallback):
            assert start == len(tokenizer.decode(ids[:i], skip_special_tokens=skip))


@pytest.mark.parametrize("style", STYLES)
@FAST
@given(text=st.text(alphabet="aheo  foxé日🙂", min_size=1, max_size=12), cut=st.integers(0, 12))
def test_an_answer_that_continues_a_text(
    sentencepiece_styles: dict[str, TextTokenizer], style: str, text: str, cut: int
) -> None:
    tokenizer = sentencepiece_styles[style]
    ids = tokenizer.encode(text)
    while cut < len(ids) and tokenizer.piece(ids[cut]).is_byte:  # a prompt that ends with whole characters
        cut += 1
    prompt = [1, *ids[:cut]]
    whole, begun = tokenizer.decode([1, *ids]), tokenizer.decode(prompt)
    assert "".join(deltas(tokenizer, ids[cut:], prompt_token_ids=prompt)) == whole.removeprefix(begun)


def test_byte_tokens_start_where_their_character_does(byte_fallback: TextTokenizer) -> None:
    [a] = [i for i in range(byte_fallback.num_tokens) if byte_fallback.piece(i).data == b"a" and i > 259]
    run = fallback_ids(byte_fallback, "é日".encode())
    assert starts(byte_fallback, [a, *run, a]) == [0, 1, 1, 2, 2, 2, 3]
    invalid = fallback_ids(byte_fallback, "é".encode() + b"\xff")
    assert starts(byte_fallback, [a, *invalid, 1, a]) == [0, 1, 2, 3, 4, 4]


def test_a_character_is_sent_when_it_is_complete(byte_level: TextTokenizer) -> None:
    assert deltas(byte_level, byte_ids(byte_level, "a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_s03_an_invalid_byte_is_replaced_once_and_the_text_goes_on(byte_level: TextTokenizer) -> None:
    ids = byte_ids(byte_level, b"ok \x85 done")
    assert "".join(deltas(byte_level, ids)) == "ok \ufffd done"


def test_a_held_tail_is_released_at_the_end(byte_level: TextTokenizer) -> None:
    assert deltas(byte_level, byte_ids(byte_level, "é".encode()[:1])) == ["", "\ufffd"]


def test_ids_without_a_token_are_empty(byte_level: TextTokenizer) -> None:
    """L-11."""
    assert deltas(byte_level, [byte_level.num_tokens + 100, 2**31]) == ["", "", ""]


@pytest.mark.parametrize("text", ["é", "日", "🙂"])
def test_s02_a_prompt_that_ends_inside_a_character(byte_level: TextTokenizer, text: str) -> None:
    """The answer may complete the character, and repeats nothing of the prompt."""
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
@example(b"\xed\xa0")
def test_incomplete_tail_is_what_could_still_become_a_character(data: bytes) -> None:
    tail = incomplete_tail(data)
    assert data.endswith(tail)
    assert len(tail) <= 3
    if tail:
        continuations = [b"\x80", b"\xa0", b"\x90", b"\x80\x80", b"\xa0\x80", b"\x90\x80", b"\x80" * 3, b"\x90\x80\x80"]
        assert any(is_character(tail + more) for more in continuations)
