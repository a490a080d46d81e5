"""Turns one choice's output tokens into text that may be sent, and decides where the answer ends.

The first of stop string, end token and length wins. Text, token ids, log-probabilities and the number of tokens always
describe the same tokens: those that put at least one character into the text, or stand before one that does. Of an
answer that a stop ended, the end token and the tokens of the stop string are no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.messages import TokenLogprobs
from common.text.detokenizer import Detokenizer
from common.text.stop import StopMatch, StopMatcher
from proxy.dispatcher import OutputBatch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class AnswerToken:
    """start: where its text begins in the answer, in characters."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class AnswerDelta:
    """A part of the answer that is certain. stop_reason: the stop string or token id that ended it."""

    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


class Answer:
    """The text of one choice as it grows.

    end_token_ids: the model's end tokens (none with ignore_eos). stop_token_ids: the request's own.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        end_token_ids: frozenset[int] = frozenset(),
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._end_token_ids = end_token_ids
        self._stop_token_ids = stop_token_ids
        self._held: deque[AnswerToken] = deque()
        self._num_characters = 0  # decoded, released or held
        self._num_released = 0
        self.num_tokens = 0
        self.is_finished = False

    def push(self, batch: OutputBatch) -> AnswerDelta:
        """What the new outputs let out; they may finish the answer, and then what follows in the batch is ignored."""
        text = []
        last = len(batch.token_ids) - 1
        for i, token_id in enumerate(batch.token_ids):
            if i == last and batch.finish_reason == "stop" and self._is_end(token_id):
                break
            released, match = self._push_token(token_id, batch.logprobs[i] if batch.logprobs else None)
            text.append(released)
            if match is not None:
                return self._finish("".join(text), "stop", match.stop)
        if batch.finish_reason is None:
            return AnswerDelta("".join(text), self._release_tokens())
        return self._finish_as_node_did(batch, "".join(text))

    def _is_end(self, token_id: int) -> bool:
        return token_id in self._end_token_ids or token_id in self._stop_token_ids

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, StopMatch | None]:
        self._held.append(AnswerToken(token_id, self._num_characters, logprobs))
        return self._push_text(self._detokenizer.push(token_id))

    def _push_text(self, text: str) -> tuple[str, StopMatch | None]:
        self._num_characters += len(text)
        released, match = self._matcher.push(text)
        self._num_released += len(released)
        return released, match

    def _finish_as_node_did(self, batch: OutputBatch, text: str) -> AnswerDelta:
        released, match = self._push_text(self._detokenizer.finish())
        text += released
        if match is not None:
            return self._finish(text, "stop", match.stop)
        rest = self._matcher.finish()
        self._num_released += len(rest)
        end_token = batch.token_ids[-1] if batch.token_ids and batch.finish_reason == "stop" else None
        stop_reason = end_token if end_token in self._stop_token_ids else None
        assert batch.finish_reason is not None
        return self._finish(text + rest, batch.finish_reason, stop_reason, is_complete=True)

    def _finish(
        self, text: str, reason: FinishReason, stop_reason: str | int | None, *, is_complete: bool = False
    ) -> AnswerDelta:
        """is_complete: all held tokens belong to the answer; otherwise those that begin after its end do not."""
        self.is_finished = True
        tokens = self._release_tokens(also_empty=is_complete)
        self._held.clear()
        return AnswerDelta(text, tokens, reason, stop_reason)

    def _release_tokens(self, *, also_empty: bool = False) -> list[AnswerToken]:
        tokens = []
        while self._held and (also_empty or self._held[0].start < self._num_released):
            tokens.append(self._held.popleft())
        self.num_tokens += len(tokens)
        return tokens
