"""Finds stop strings in text that arrives in pieces, and holds back what may begin one.

The match that is complete first ends the text, whatever the pieces are; of two that end together the longer one counts.
Knows characters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """The stop string that was found; the text that was released ends just before it."""

    stop: str


class StopMatcher:
    """Released text never contains a part of a stop string that was found later."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, delta: str) -> tuple[str, StopMatch | None]:
        """Text that is certain now, and the match if one is complete; after a match nothing may be pushed."""
        if not self._stops or not delta:
            return delta, None
        text = self._held + delta
        if (found := self._first_match(text)) is not None:
            start, stop = found
            self._held = ""
            return text[:start], StopMatch(stop)
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

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
