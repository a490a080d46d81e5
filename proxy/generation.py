"""One request of a client while it is answered: its prompts, each with a dispatcher, and the texts of their choices.

Knows no HTTP and no OpenAI shapes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from common.clock import Clock, SystemClock
from common.errors import ContextLengthError, InvalidRequestError, TandemError, UnavailableError
from common.logging import log_event
from common.messages import TokenLogprobs
from common.sampling_params import SamplingParams
from common.text.answer import Answer, AnswerDelta
from common.text.bad_words import encode_bad_words
from common.text.detokenizer import Detokenizer
from proxy.cluster import Cluster
from proxy.dispatcher import Dispatcher, DispatchLimits, Job
from proxy.openai_response import Usage
from proxy.openai_schema import GenerationBody
from proxy.request_metrics import RequestMetrics, RequestTrace
from proxy.serving_model import ServingModel

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt of a request; its choices share the dispatcher."""

    token_ids: Sequence[int]
    dispatcher: Dispatcher
    trace: RequestTrace

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Of its tokens but the first; complete when an answer is finished, if they were asked for."""
        return self.dispatcher.prompt_logprobs


@dataclass(frozen=True, eq=False)
class _Choice:
    """index: among the choices of all prompts. number: among those of its own."""

    index: int
    number: int
    prompt: Prompt
    answer: Answer

    def advance(self) -> AnswerDelta | None:
        """What can be said now; None when nothing new is there."""
        batch = self.prompt.dispatcher.take(self.number)
        return self.answer.push(batch) if batch is not None else None

    def end(self, finish_reason: str) -> None:
        """Its answer is finished. A node that has finished by itself is not told."""
        self.prompt.dispatcher.close_choice(self.number, "stop string")
        self.count(finish_reason)

    def count(self, outcome: str) -> None:
        """What was counted before is not counted again."""
        self.prompt.trace.ended(outcome, self.answer.num_tokens, self.number)


class Generation:
    """Iterate `deltas` to its end or leave it; `close` in any case."""

    def __init__(self, name: str, prompts: Sequence[Prompt], choices: Sequence[_Choice], wakeup: asyncio.Event) -> None:
        self._name = name
        self.prompts = prompts
        self._choices = choices
        self._wakeup = wakeup
        self._failure: TandemError | None = None
        for prompt in prompts:
            prompt.dispatcher.start()

    @property
    def num_choices(self) -> int:
        """Of all prompts together, those of the first prompt first."""
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """A prompt counts once, every generated choice counts."""
        return Usage(
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            num_output_tokens=sum(choice.answer.num_tokens for choice in self._choices),
            num_cached_tokens=sum(prompt.dispatcher.num_cached_tokens or 0 for prompt in self.prompts),
        )

    async def deltas(self) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        """(choice, delta) as they come, until all choices are finished; raises the error that ends one of them.

        A consumer that is slow gets fewer and larger deltas.
        """
        unfinished = list(self._choices)
        while unfinished:
            await self._wakeup.wait()
            self._wakeup.clear()
            for choice in list(unfinished):
                delta = self._advance(choice)
                if choice.answer.is_finished:
                    unfinished.remove(choice)
                if delta:
                    yield choice.index, delta

    def _advance(self, choice: _Choice) -> AnswerDelta | None:
        try:
            delta = choice.advance()
        except TandemError as error:
            self._failure = error
            raise
        if delta is not None and delta.finish_reason is not None:
            choice.end(delta.finish_reason)
        return delta

    def close(self) -> None:
        """Whatever still runs is aborted."""
        outcome = "finished" if all(choice.answer.is_finished for choice in self._choices) else "abort"
        if self._failure is not None:
            outcome = "error"
        for prompt in self.prompts:
            prompt.dispatcher.close("client left")
        for choice in self._choices:
            choice.count(outcome)
        usage = self.usage
        log_event(
            log,
            "request_ended",
            request_id=self._name,
            outcome=outcome,
            error=self._failure.code if self._failure else None,
            choices=self.num_choices,
            prompt_tokens=usage.num_prompt_tokens,
            output_tokens=usage.num_output_tokens,
            seconds=self.prompts[0].trace.age_seconds,
            legs=max(prompt.dispatcher.leg for prompt in self.prompts),
        )


class Generator:
    """Starts generations: checks what only model and cluster know, and hands every prompt to a dispatcher."""

    def __init__(
        self,
        model: ServingModel,
        cluster: Cluster,
        metrics: RequestMetrics,
        limits: DispatchLimits,
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._cluster = cluster
        self._metrics = metrics
        self._limits = limits
        self._clock = clock or SystemClock()
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return self._clock.now()

    def start(
        self,
        name: str,
        arrived: float,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        *,
        default_max_tokens: int | None,
        continues_prompt: bool,
    ) -> Generation:
        """Raises InvalidRequestError or UnavailableError before anything is started.

        name: for the log. arrived: when the request came, by `now`.
        default_max_tokens: when the request has none; None: the model's own default, or else as many as fit.
        continues_prompt: the answer goes on where the prompt's text ends (completions).
        """
        if self._cluster.is_closing:
            raise UnavailableError(SHUTTING_DOWN)
        self._check_sequences(body)
        defaults = self._model.sampling_defaults
        body = body.with_defaults(defaults.values)
        default_max_tokens = default_max_tokens or defaults.max_tokens
        max_tokens = [self._max_tokens(body, len(prompt), default_max_tokens) for prompt in prompts]
        all_params = self._all_params(body, max_tokens)
        wakeup = asyncio.Event()
        started = [
            self._prompt(body, prompt, params, wakeup, arrived)
            for prompt, params in zip(prompts, all_params, strict=True)
        ]
        places = itertools.product(started, range(body.num_generated))
        choices = [
            _Choice(index, number, prompt, self._answer(body, prompt.token_ids if continues_prompt else ()))
            for index, (prompt, number) in enumerate(places)
        ]
        return Generation(name, started, choices, wakeup)

    def _check_sequences(self, body: GenerationBody) -> None:
        """More than any node runs at once will never start. Who comes before the first node waits for it."""
        limit = self._cluster.pool.max_num_seqs
        if limit is not None and body.num_sequences > limit:
            field = body.sequences_field
            raise InvalidRequestError(
                f"{field} is {body.num_sequences}, must be at most {limit}: no decode node here runs more at once",
                param=field,
            )

    def _all_params(self, body: GenerationBody, max_tokens: Sequence[int]) -> list[SamplingParams]:
        """Of each prompt; token ids are checked here, where the vocabulary is known."""
        for field, token_ids in body.token_id_fields.items():
            self._model.check_token_ids(token_ids, field)
        bad_words = encode_bad_words(body.bad_words, self._model.tokenizer)
        for word in bad_words:
            self._model.check_token_ids(word, "bad_words")
        return [
            body.sampling_params(
                max_tokens=n,
                seed=body.seed if body.seed is not None else secrets.randbits(63),
                bad_words_token_ids=bad_words,
            )
            for n in max_tokens
        ]

    def _prompt(
        self, body: GenerationBody, token_ids: list[int], params: SamplingParams, wakeup: asyncio.Event, arrived: float
    ) -> Prompt:
        job = Job(
            f"{self._cluster.instance_id}/{next(self._numbers)}",
            token_ids,
            params,
            num_choices=body.num_generated,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        trace = self._metrics.arrived(len(token_ids), arrived)
        dispatcher = Dispatcher(job, self._cluster, trace=trace, wakeup=wakeup, limits=self._limits, clock=self._clock)
        return Prompt(token_ids, dispatcher, trace)

    def _answer(self, body: GenerationBody, text_before: Sequence[int]) -> Answer:
        """text_before: token ids whose text the answer goes on after."""
        detokenizer = Detokenizer(
            self._model.tokenizer, skip_special_tokens=body.skip_special_tokens, prompt_token_ids=text_before
        )
        return Answer(
            detokenizer,
            body.stops,
            end_token_ids=frozenset() if body.ignore_eos else self._model.limits.eos_token_ids,
            stop_token_ids=frozenset(body.stop_token_ids),
            includes_stop=body.include_stop_str_in_output,
        )

    def _max_tokens(self, body: GenerationBody, num_prompt_tokens: int, default: int | None) -> int:
        """Explicit limits are taken at their word; without one the answer ends where the context does."""
        limit = self._model.max_model_len
        room = limit - num_prompt_tokens
        asked = body.max_output_tokens
        if asked is None:
            return min(default, room) if default is not None else room
        if asked > room:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} for the answer). "
                "Please shorten the prompt or ask for fewer tokens.",
                param="max_tokens",
            )
        return asked
