"""The log-probabilities of a prompt's tokens, put together from the pieces that a node sends. Knows no text."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages import TokenLogprobs


class PromptLogprobs:
    """num_expected: how many there will be; none was asked for, or the prompt has one token only: 0."""

    def __init__(self, num_expected: int) -> None:
        self._num_expected = num_expected
        self.entries: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return len(self.entries) == self._num_expected

    def restart(self) -> None:
        """Another node sends them, from the first one on; not needed when all are there."""
        if not self.is_complete:
            self.entries.clear()

    def add(self, start: int, piece: Sequence[TokenLogprobs]) -> bool:
        """A piece that begins at this position of the prompt. False when those before it are missing.

        One that came before is dropped as a whole: nodes send the same pieces again, not other ones.
        """
        next_start = 1 + len(self.entries)
        if start == next_start:
            self.entries += piece[: self._num_expected - len(self.entries)]
        return start <= next_start or self.is_complete
