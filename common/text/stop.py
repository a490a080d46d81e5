"""Finds stop strings in text that arrives in pieces, and holds back what may begin one.

The match that is complete first ends the text, whatever the pieces are; of two that end together the longer one counts.
Knows characters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """The stop string that was found; the text that was released ends just before it, or with it if it is included."""

    stop: str


class StopMatcher:
    """Released text never contains a part of a stop string that was found later, unless that is to be included.

    includes_stop: the stop string is the last part of the text; then nothing is held back.
    """

    def __init__(self, stops: Sequence[str] = (), *, includes_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._open = ""  # the end of the text that may begin a stop string

    def push(self, delta: str) -> tuple[str, StopMatch | None]:
        """Text that is certain now, and the match if one is complete; after a match nothing may be pushed."""
        if not self._stops or not delta:
            return delta, None
        text = self._open + delta
        begin = len(self._open) if self._includes_stop else 0  # what is before it was released
        if (found := self._first_match(text)) is not None:
            start, stop = found
            self._open = ""
            return text[begin : start + len(stop) if self._includes_stop else start], StopMatch(stop)
        num_open = max(_overlap(text, stop) for stop in self._stops)
        self._open = text[len(text) - num_open :]
        return text[begin : len(text) if self._includes_stop else len(text) - num_open], None

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._open = self._open, ""
        return "" if self._includes_stop else held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
