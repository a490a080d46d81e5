"""Answers in OpenAI's shapes: whole replies, stream chunks, log-probabilities, usage. Knows no HTTP.

Numbers that JSON cannot express (minus infinity of a masked token) become -9999, as other servers write it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.messages import TokenLogprobs
from common.text.answer import AnswerDelta, AnswerToken, FinishReason
from common.text.tokenizer import TextTokenizer

_LOWEST_LOGPROB = -9999.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens of all prompts and choices. num_cached_tokens: prompt tokens whose KV nobody computed for this request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass
class ChoiceText:
    """A choice of a reply that is not streamed: its deltas put together."""

    parts: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: AnswerDelta) -> None:
        self.parts.append(delta.text)
        self.tokens += delta.tokens
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True)
class PromptTokens:
    """A prompt whose log-probabilities were asked for: of its tokens but the first."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True)
class ReplyHead:
    """What all chunks of one reply have in common. created: seconds since 1970."""

    reply_id: str
    model: str
    created: int


class ReplyFormat(Protocol):
    """One endpoint's shapes."""

    def opening(self, index: int) -> Json | None:
        """A chunk before the first delta of a choice, if there is one."""
        ...

    def chunk(self, index: int, delta: AnswerDelta) -> Json: ...
    def usage_chunk(self, usage: Usage) -> Json: ...
    def reply(self, choices: Sequence[ChoiceText], usage: Usage, prompts: Sequence[PromptTokens] = ()) -> Json:
        """prompts: if their log-probabilities were asked for. The first one's choices come first, all have as many."""
        ...


class _Format:
    """wants_logprobs, returns_token_ids: what the request asked for.

    includes_usage: a last chunk will have the usage; every other chunk then says "usage": null.
    """

    chunk_object = ""
    reply_object = ""

    def __init__(
        self,
        head: ReplyHead,
        tokenizer: TextTokenizer,
        *,
        wants_logprobs: bool = False,
        returns_token_ids: bool = False,
        includes_usage: bool = False,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._returns_token_ids = returns_token_ids
        self._extra: Json = {"usage": None} if includes_usage else {}

    def usage_chunk(self, usage: Usage) -> Json:
        return self._body(self.chunk_object, [], {"usage": usage.to_json()})

    def _token_ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self._returns_token_ids else {}

    @staticmethod
    def _stop_reason(delta: AnswerDelta) -> Json:
        return {"stop_reason": delta.stop_reason} if delta.finish_reason else {}

    def _prompt_logprobs(self, prompt: PromptTokens) -> Json:
        """vLLM's field: nothing for the first token; for each other one itself and the most likely ones, by token id.

        rank: among all tokens, 1 for the most likely one.
        """
        entries = zip(prompt.token_ids[1:], prompt.logprobs, strict=True)
        return {"prompt_logprobs": [None, *(self._ranked(*entry) for entry in entries)]}

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> Json:
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
        ranked = {token_id: (logprobs.logprob, logprobs.rank)}
        for rank, (top_id, logprob) in enumerate(top, 1):
            ranked.setdefault(top_id, (logprob, rank))
        return {
            str(i): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(i)}
            for i, (logprob, rank) in ranked.items()
        }

    def _chunk(self, choice: Json) -> Json:
        return self._body(self.chunk_object, [choice], self._extra)

    def _body(self, kind: str, choices: list[Json], extra: Json) -> Json:
        head = self._head
        return {
            "id": head.reply_id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            **extra,
        }


class ChatFormat(_Format):
    chunk_object = "chat.completion.chunk"
    reply_object = "chat.completion"

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, index: int, delta: AnswerDelta) -> Json:
        content = {"content": delta.text} if delta.text or not delta.finish_reason else {}
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }
        return self._chunk(choice | self._stop_reason(delta) | self._token_ids(delta.token_ids))

    def reply(self, choices: Sequence[ChoiceText], usage: Usage, prompts: Sequence[PromptTokens] = ()) -> Json:
        items = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens, is_whole=True),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._token_ids(choice.token_ids),
            }
            for index, choice in enumerate(choices)
        ]
        prompt = self._prompt_logprobs(prompts[0]) if prompts else {}
        return self._body(self.reply_object, items, {"usage": usage.to_json(), **prompt})

    def _logprobs(self, tokens: Sequence[AnswerToken], *, is_whole: bool = False) -> Json | None:
        if not self._wants_logprobs or not (tokens or is_whole):
            return None
        return {"content": [self._entry(token) for token in tokens]}

    def _entry(self, token: AnswerToken) -> Json:
        logprobs = token.logprobs or TokenLogprobs(math.nan)
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
        return self._token(token.token_id, logprobs.logprob) | {"top_logprobs": [self._token(*item) for item in top]}

    def _token(self, token_id: int, logprob: float) -> Json:
        piece = self._tokenizer.piece(token_id)
        return {"token": self._tokenizer.token_text(token_id), "logprob": finite(logprob), "bytes": list(piece.data)}


class CompletionFormat(_Format):
    chunk_object = "text_completion"
    reply_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, index: int, delta: AnswerDelta) -> Json:
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
        }
        return self._chunk(choice | self._stop_reason(delta) | self._token_ids(delta.token_ids))

    def reply(self, choices: Sequence[ChoiceText], usage: Usage, prompts: Sequence[PromptTokens] = ()) -> Json:
        shown = [self._prompt_logprobs(prompt) for prompt in prompts]
        num_each = len(choices) // max(1, len(prompts))
        items = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._token_ids(choice.token_ids),
                **(shown[index // num_each] if shown else {}),
            }
            for index, choice in enumerate(choices)
        ]
        return self._body(self.reply_object, items, {"usage": usage.to_json()})

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [finite(token.logprobs.logprob if token.logprobs else math.nan) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def _top(self, token: AnswerToken) -> dict[str, float]:
        """By token text, best first; the sampled token is always in it."""
        logprobs = token.logprobs or TokenLogprobs(math.nan)
        pairs = [*zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False), (token.token_id, logprobs.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(self._name(token_id), finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Parts of characters are written as OpenAI does, so that two of them do not share a key."""
        data = self._tokenizer.piece(token_id).data
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(number: float) -> float:
    return number if math.isfinite(number) else _LOWEST_LOGPROB
