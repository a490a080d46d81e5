"""Turns one choice's output tokens into text that may be sent, and decides where the answer ends.

The first of stop string, end token and length wins. Text, token ids, log-probabilities and the number of tokens always
describe the same tokens: those that put at least one character into the text, or stand before one that does. Of an
answer that a stop ended, the end token and the tokens of the stop string are no part, unless it is to be included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.messages import TokenLogprobs
from common.text.detokenizer import Decoded, Detokenizer
from common.text.stop import StopMatch, StopMatcher

FinishReason = Literal["stop", "length"]
_Unplaced = tuple[int, TokenLogprobs | None]


@dataclass(frozen=True)
class OutputBatch:
    """Outputs taken together, in order; finish_reason is that of the last one when the choice is finished."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class AnswerToken:
    """start: where its text begins in the answer, in characters."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class AnswerDelta:
    """A part of the answer that is certain. stop_reason: the stop string or token id that ended it.

    trimmed: generated tokens that ended the answer and are no part of it.
    """

    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    trimmed: list[AnswerToken] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """All that the model generated, those that ended the answer included."""
        return [token.token_id for token in (*self.tokens, *self.trimmed)]

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


class Answer:
    """The text of one choice as it grows.

    end_token_ids: the model's end tokens (none with ignore_eos). stop_token_ids: the request's own.
    includes_stop: the stop string, or the end token if it shows as text, is the last part of the answer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        end_token_ids: frozenset[int] = frozenset(),
        stop_token_ids: frozenset[int] = frozenset(),
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, includes_stop=includes_stop)
        self._includes_stop = includes_stop
        self._end_token_ids = end_token_ids
        self._stop_token_ids = stop_token_ids
        self._unplaced: deque[_Unplaced] = deque()  # where they start is not known yet
        self._held: deque[AnswerToken] = deque()
        self._num_released = 0
        self.num_tokens = 0
        self.is_finished = False

    def push(self, batch: OutputBatch) -> AnswerDelta:
        """What the new outputs let out; they may finish the answer, and then what follows in the batch is ignored."""
        text: list[str] = []
        last = len(batch.token_ids) - 1
        for i, token_id in enumerate(batch.token_ids):
            logprobs = batch.logprobs[i] if batch.logprobs else None
            is_end = i == last and self._is_end(token_id, batch)
            if is_end and not (self._includes_stop and self._detokenizer.shows(token_id)):
                end = (token_id, logprobs)
                return self._finish_whole("".join(text), "stop", self._stop_reason(token_id), end)
            released, match = self._push_token(token_id, logprobs)
            text.append(released)
            if match is not None:
                return self._finish_at_stop("".join(text), match)
            if is_end:
                return self._finish_whole("".join(text), "stop", self._stop_reason(token_id))
        if batch.finish_reason is None:
            return AnswerDelta("".join(text), self._release_tokens())
        return self._finish_whole("".join(text), batch.finish_reason)

    def _is_end(self, token_id: int, batch: OutputBatch) -> bool:
        return batch.finish_reason == "stop" and (token_id in self._end_token_ids or token_id in self._stop_token_ids)

    def _stop_reason(self, end_token_id: int) -> int | None:
        return end_token_id if end_token_id in self._stop_token_ids else None

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, StopMatch | None]:
        self._unplaced.append((token_id, logprobs))
        return self._push_decoded(self._detokenizer.push(token_id))

    def _push_decoded(self, decoded: Decoded) -> tuple[str, StopMatch | None]:
        for start in decoded.starts:
            token_id, logprobs = self._unplaced.popleft()
            self._held.append(AnswerToken(token_id, start, logprobs))
        released, match = self._matcher.push(decoded.text)
        self._num_released += len(released)
        return released, match

    def _finish_whole(
        self, text: str, reason: FinishReason, stop_reason: int | None = None, end: _Unplaced | None = None
    ) -> AnswerDelta:
        """All held tokens belong to the answer, unless the very last text completes a stop string."""
        released, match = self._push_decoded(self._detokenizer.finish())
        if match is not None:
            return self._finish_at_stop(text + released, match, end)
        rest = self._matcher.finish()
        self._num_released += len(rest)
        self.is_finished = True
        tokens = self._release_tokens(also_empty=True)
        return AnswerDelta(text + released + rest, tokens, reason, stop_reason, self._trim(end))

    def _finish_at_stop(self, text: str, match: StopMatch, end: _Unplaced | None = None) -> AnswerDelta:
        """Held tokens that begin after the answer's end are no part of it. All are placed: any text places them."""
        self.is_finished = True
        return AnswerDelta(text, self._release_tokens(), "stop", match.stop, self._trim(end))

    def _trim(self, end: _Unplaced | None) -> list[AnswerToken]:
        """What is left of the outputs, the end token behind all."""
        trimmed = [*self._held, *([AnswerToken(end[0], self._num_released, end[1])] if end else [])]
        self._held.clear()
        return trimmed

    def _release_tokens(self, *, also_empty: bool = False) -> list[AnswerToken]:
        tokens = []
        while self._held and (also_empty or self._held[0].start < self._num_released):
            tokens.append(self._held.popleft())
        self.num_tokens += len(tokens)
        return tokens
