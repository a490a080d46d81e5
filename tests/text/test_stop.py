"""Stop strings: cut at the same character however the text arrives, nothing of them released, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str], *, includes_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, includes_stop=includes_stop)
    released = []
    for piece in pieces:
        text, match = matcher.push(piece)
        released.append(text)
        if match is not None:
            return released, match.stop
    return [*released, matcher.finish()], None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: character by character, the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_s05_a_beginning_is_held_back() -> None:
    assert run(["END!"], ["fine EN", "D! more"]) == (["fine ", ""], "END!")


def test_s05_a_false_start_is_released() -> None:
    assert run(["END!"], ["fine EN", "X"]) == (["fine ", "ENX", ""], None)


def test_what_is_held_at_the_end_is_released() -> None:
    assert run(["END!"], ["fine EN"]) == (["fine ", "EN"], None)


def test_s06_a_phrase_over_many_pieces() -> None:
    assert run(["red blue"], ["a r", "ed", " bl", "ue", " z"])[0] == ["a ", "", "", ""]


def test_overlapping_beginnings() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], "aab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


texts = st.text(alphabet="abc", max_size=20)


@given(stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4), pieces=st.lists(texts, max_size=8))
def test_equals_the_definition_for_any_pieces(stops: list[str], pieces: list[str]) -> None:
    released, stop = run(stops, pieces)
    assert ("".join(released), stop) == reference(stops, "".join(pieces))


@given(stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4), pieces=st.lists(texts, max_size=8))
def test_an_included_stop_string_is_the_last_part_and_nothing_is_held_back(stops: list[str], pieces: list[str]) -> None:
    text, expected = reference(stops, "".join(pieces))
    released, stop = run(stops, pieces, includes_stop=True)
    assert ("".join(released), stop) == (text + (expected or ""), expected)
    num_whole = len(released) - 1  # the last one was cut, or is what was left
    assert released[:num_whole] == pieces[:num_whole]


@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), pieces=st.lists(texts))
def test_holds_back_no_more_than_it_must(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, sent = "", ""
    for piece in pieces:
        text, match = matcher.push(piece)
        seen, sent = seen + piece, sent + text
        if match is not None:
            return
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
