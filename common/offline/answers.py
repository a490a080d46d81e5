"""One prompt while it is answered offline: what its engine request gives, turned into texts. Starts nothing.

events of its engine request -> take -> choices to abort (a stop text ended them)
                             -> output: the prompt and its answers as they are now
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.engine.events import Event, FailedEvent, OutputEvent, ScoredEvent, SearchEndedEvent
from common.messages import TokenLogprobs
from common.offline.outputs import CompletionOutput, FinishReason, Logprob, Logprobs, RequestOutput
from common.offline.params import SamplingParams
from common.request import FinishReason as EngineFinishReason
from common.request import Request
from common.scheduling.beam_search import BeamSearch
from common.text.answer import Answer, AnswerToken, OutputBatch
from common.text.best_of import mean_logprob
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import TextTokenizer


class PromptAnswers:
    """request: what the engine is given. text: the prompt, if it came as a text."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: TextTokenizer,
        *,
        text: str | None,
        end_token_ids: frozenset[int],
        continues_prompt: bool,
    ) -> None:
        self.request = request
        self.params = params
        self._tokenizer = tokenizer
        self._text = text
        before = request.prompt_token_ids if continues_prompt else ()
        self._choices = [_Choice(number, params, tokenizer, before, end_token_ids) for number in range(self._num_made)]
        sequences = list(request.choices or [request])
        self.engine_ids = [request.request_id, *(choice.request_id for choice in request.choices)]
        """Whose events are for it."""
        self._is_shared = bool(request.choices)
        self._by_engine_id = dict(zip((one.request_id for one in sequences), self._choices, strict=False))
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_cached_tokens: int | None = None

    @property
    def _num_made(self) -> int:
        return self.params.num_generated

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    def take(self, event: Event) -> str | None:
        """The engine request to abort, if a stop text ended its answer."""
        if isinstance(event, OutputEvent):
            if self._num_cached_tokens is None:
                self._num_cached_tokens = event.num_cached_tokens
            choice = self._by_engine_id[event.request_id]
            logprobs = None if event.logprobs is None else [event.logprobs]
            batch = _as_batch([event.token_id], logprobs, event.finish_reason)
            if choice.finish_reason is None and choice.push(batch) and event.finish_reason is None:
                return event.request_id
        elif isinstance(event, ScoredEvent):
            self._prompt_logprobs += event.logprobs
        elif isinstance(event, SearchEndedEvent):
            self._take_beams(event.request)
        elif isinstance(event, FailedEvent):
            alone = self._by_engine_id.get(event.request_id) if self._is_shared else None
            for choice in [alone] if alone else self._choices:
                choice.fail(event.error)
        return None

    def _take_beams(self, request: Request) -> None:
        search = request.beam_search
        assert isinstance(search, BeamSearch)
        self._num_cached_tokens = request.num_cached_tokens
        beams = search.results(len(self._choices))
        for choice, beam in zip(self._choices, beams, strict=False):
            choice.push(_as_batch(beam.token_ids, beam.logprobs, beam.finish_reason))
        for choice in self._choices[len(beams) :]:
            choice.fail(f"beam search found {len(beams)} answers only")

    def output(self) -> RequestOutput:
        """A value of its own: it does not grow."""
        returned = self._choices
        if self._num_made > self.params.n and self.is_finished:
            returned = sorted(returned, key=lambda choice: mean_logprob(choice.kept), reverse=True)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._text,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[choice.output(index) for index, choice in enumerate(returned[: self.params.n])],
            finished=self.is_finished,
            prompt_logprobs=self._shown_prompt_logprobs(),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _shown_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        later = zip(self.request.prompt_token_ids[1:], self._prompt_logprobs, strict=False)
        return [None, *(_shown(token_id, logprobs, self._tokenizer) for token_id, logprobs in later)]


class _Choice:
    def __init__(
        self,
        number: int,
        params: SamplingParams,
        tokenizer: TextTokenizer,
        text_before: Sequence[int],
        end_token_ids: frozenset[int],
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._answer = Answer(
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=text_before),
            params.stops,
            end_token_ids=frozenset() if params.ignore_eos else end_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            includes_stop=params.include_stop_str_in_output,
        )
        self._parts: list[str] = []
        self.kept: list[AnswerToken] = []
        self._trimmed: list[AnswerToken] = []
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None

    def push(self, batch: OutputBatch) -> bool:
        """True when this finished it."""
        delta = self._answer.push(batch)
        self._parts.append(delta.text)
        self.kept += delta.tokens
        self._trimmed += delta.trimmed
        self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        return delta.finish_reason is not None

    def fail(self, error: str) -> None:
        if self.finish_reason is None:
            self.finish_reason, self._error = "error", error

    def output(self, index: int) -> CompletionOutput:
        tokens = [*self.kept, *self._trimmed]
        logprobs: Logprobs | None = None
        if self._params.logprobs is not None:
            logprobs = [
                _shown(token.token_id, token.logprobs, self._tokenizer)
                for token in tokens
                if token.logprobs is not None
            ]
        known = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
        return CompletionOutput(
            index=index,
            text="".join(self._parts) if self._params.detokenize else "",
            token_ids=[token.token_id for token in tokens],
            cumulative_logprob=math.fsum(known) if known else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )


def _as_batch(
    token_ids: list[int], logprobs: list[TokenLogprobs] | None, reason: EngineFinishReason | None
) -> OutputBatch:
    if reason is EngineFinishReason.STOP:
        return OutputBatch(token_ids, logprobs, "stop")
    return OutputBatch(token_ids, logprobs, None if reason is None else "length")


def _shown(token_id: int, logprobs: TokenLogprobs, tokenizer: TextTokenizer) -> dict[int, Logprob]:
    """The most likely tokens, best first, and the token itself."""
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    shown = {other: Logprob(logprob, rank, tokenizer.token_text(other)) for rank, (other, logprob) in enumerate(top, 1)}
    shown.setdefault(token_id, Logprob(logprobs.logprob, logprobs.rank or None, tokenizer.token_text(token_id)))
    return shown
