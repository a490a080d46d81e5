"""A decode node: owns its requests from admission to the end, samples everything, emits every token.

Joins three parts that do not know each other: the control connections (what proxies ask), the engine (what it
computes) and the fetch client (KV that other nodes computed). All methods run on the event loop; the engine's and the
fetch client's threads reach it through `post`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import messages as m
from common.clock import Clock, SystemClock
from common.engine.async_engine import AsyncEngine
from common.engine.events import (
    Event,
    FailedEvent,
    OutputEvent,
    ReservedEvent,
    RevokedEvent,
    ScoredEvent,
    SearchEndedEvent,
)
from common.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from common.request import FinishReason, Request
from common.scheduling.beam_search import BeamSearch, Hypothesis
from common.structured_output import StructuredOutput
from decode_node.admission import Admission, OpenFetch
from decode_node.grammars import Grammars
from decode_node.legs import DecodeLimits, Leg, Legs, LiveChoice, LivePrompt, make_requests, numbers_of
from decode_node.metrics import DecodeMetrics
from decode_node.output_log import OutputLog

log = logging.getLogger(__name__)

Send = Callable[[str, m.NodeMessage], int | None]


@dataclass(frozen=True)
class _Compiling:
    """A Decode that is answered when its grammar is compiled."""

    proxy_id: str
    leg: int
    num_choices: int
    task: asyncio.Task[None]


class DecodeNode:
    """Everything a decode node does with its proxies' messages and its engine's events."""

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        open_fetch: OpenFetch,
        send: Send,
        hello: Callable[[m.NodeStats, list[m.LiveRequest]], m.Hello],
        limits: DecodeLimits,
        block_size: int,
        hidden_size: int,
        metrics: DecodeMetrics,
        grammars: Grammars,
        queue_seconds: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._open_fetch = open_fetch
        self._send = send
        self._hello = hello
        self._limits = limits
        self._block_size = block_size
        self._hidden_size = hidden_size
        self._queue_seconds = queue_seconds
        self._clock = clock or SystemClock()
        self._metrics = metrics
        self._grammars = grammars
        self._compiling: dict[str, _Compiling] = {}  # by request id
        self._loop = asyncio.get_running_loop()
        self._legs = Legs()
        self._log = OutputLog(keep_seconds=30.0)
        self.is_draining = False

    # --- ControlHandler --------------------------------------------------------------------------------------------

    def hello(self, proxy_id: str) -> m.Hello:
        return self._hello(self._engine.stats(), self._log.live(proxy_id))

    def status(self) -> m.Status:
        return m.Status(stats=self._engine.stats(), is_draining=self.is_draining)

    def received(self, proxy_id: str, message: m.ProxyMessage) -> None:
        if isinstance(message, m.Decode):
            self._decode(proxy_id, message)
        elif isinstance(message, m.Abort):
            self._abort(message)
        elif isinstance(message, m.Resend):
            self._resend(proxy_id, message)
        elif isinstance(message, m.Drain):
            self.drain()
        elif isinstance(message, m.ResetPrefixCache):
            self._engine.reset_prefix_cache()

    def acknowledged(self, proxy_id: str, sequence: int) -> None:
        self._log.acknowledge(proxy_id, sequence, self._clock.now())

    def proxy_lost(self, proxy_id: str) -> None:
        self._log.forget_proxy(proxy_id)
        for request_id in [key for key, compiling in self._compiling.items() if compiling.proxy_id == proxy_id]:
            self._stop_compiling(request_id)
        for leg in [leg for leg in self._legs.all() if leg.proxy_id == proxy_id]:
            self._end_leg(leg)

    def drain(self) -> None:
        """No new work from now on."""
        self.is_draining = True

    @property
    def num_live_requests(self) -> int:
        """Answers that are still to come."""
        return len(self._legs) + sum(compiling.num_choices for compiling in self._compiling.values())

    def abort_all(self) -> None:
        for request_id in list(self._compiling):
            self._stop_compiling(request_id)
        for leg in self._legs.all():
            self._end_leg(leg)

    # --- requests --------------------------------------------------------------------------------------------------

    def _decode(self, proxy_id: str, message: m.Decode) -> None:
        newest, compiling = self._legs.get(message.request_id), self._compiling.get(message.request_id)
        if (newest is not None and newest.number >= message.leg) or (compiling and compiling.leg >= message.leg):
            return  # a repeated message
        if newest is not None:
            self._end_leg(newest)
        self._stop_compiling(message.request_id)
        requests = make_requests(message, self._limits, self._clock.now())
        if rejection := self._rejection(message, requests):
            self._send(proxy_id, rejection)
        elif (wanted := message.params.structured_output) is not None:
            task = self._loop.create_task(self._compile(proxy_id, message, requests, wanted))
            self._compiling[message.request_id] = _Compiling(proxy_id, message.leg, len(message.choices), task)
        else:
            self._accept(proxy_id, message, requests)

    async def _compile(
        self, proxy_id: str, message: m.Decode, requests: list[Request], wanted: StructuredOutput
    ) -> None:
        """Then answers the Decode. Cancelled when nobody waits for the answer any more."""
        try:
            grammar = await self._grammars.compile(wanted)
        except TandemError as error:
            del self._compiling[message.request_id]
            self._send(proxy_id, _rejected(message, error))
        else:
            del self._compiling[message.request_id]
            for request in requests:
                for sampling in request.choices or [request]:
                    sampling.grammar = grammar
            self._accept(proxy_id, message, requests)

    def _stop_compiling(self, request_id: str) -> None:
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling.task.cancel()

    def _accept(self, proxy_id: str, message: m.Decode, requests: list[Request]) -> None:
        self._send(proxy_id, m.Accepted(request_id=message.request_id, leg=message.leg))
        numbers = [so_far.choice for so_far in message.choices]
        self._log.open(proxy_id, message.request_id, message.leg, numbers)
        leg = Leg(proxy_id, message.request_id, message.leg)
        leg.timer = self._loop.call_later(message.deadline_seconds, self._expire, leg)
        self._legs.add(leg)
        prompts = [self._place(leg, message, request) for request in requests]
        for prompt in prompts:
            prompt.admission.start()

    def _place(self, leg: Leg, message: m.Decode, request: Request) -> LivePrompt:
        admission = Admission(
            request,
            message.sources,
            engine=self._engine,
            open_fetch=self._open_fetch,
            post=self.post,
            block_size=self._block_size,
            hidden_size=self._hidden_size,
            queue_seconds=min(self._queue_seconds, message.deadline_seconds),
        )
        prompt = self._legs.place(leg, request, admission, numbers_of(request, message))
        for choice in prompt.choices:
            self._metrics.admitted(choice.engine_id, has_sources=bool(message.sources))
        return prompt

    def _rejection(self, message: m.Decode, requests: list[Request]) -> m.Rejected | None:
        try:
            self._check(message, requests)
        except TandemError as error:
            return _rejected(message, error)
        except ValueError as error:
            return _rejected(message, InvalidRequestError(str(error)))
        return None

    def _check(self, message: m.Decode, requests: list[Request]) -> None:
        """Raises OverloadedError or UnavailableError where another node may take it, otherwise why none can."""
        if self.is_draining:
            raise UnavailableError("this node is draining")
        num_held, search = self.num_live_requests, message.params.beam_search
        if num_held + max(len(message.choices), search.width if search else 0) > self._limits.max_requests:
            raise OverloadedError(f"{num_held} requests are held, at most {self._limits.max_requests} may be")
        numbers = [so_far.choice for so_far in message.choices]
        if len(set(numbers)) < len(numbers):
            raise InvalidRequestError(f"the choices {numbers} are not distinct")
        worst = max(max(message.prompt_token_ids), *(max(c.outputs, default=0) for c in message.choices))
        if worst >= self._limits.vocab_size:
            raise InvalidRequestError(
                f"token id {worst} is out of range, the vocabulary has {self._limits.vocab_size} tokens"
            )
        message.params.check_vocabulary(self._limits.vocab_size)
        for request in requests:
            self._engine.check_fits(request)

    def _abort(self, message: m.Abort) -> None:
        compiling = self._compiling.get(message.request_id)
        if compiling is not None and compiling.leg <= message.leg and message.choice is None:
            self._stop_compiling(message.request_id)
        leg = self._legs.get(message.request_id)
        if leg is not None and leg.number > message.leg:
            return  # meant for an earlier placement
        if message.choice is None:
            self._log.forget(message.request_id)
            if leg is not None:
                self._end_leg(leg)
            return
        self._log.close_choice(message.request_id, message.choice)
        if leg is not None and (choice := leg.choices.get(message.choice)) is not None:
            self._end(choice, abort=True)

    def _expire(self, leg: Leg) -> None:
        choices = list(leg.choices.values())
        self._end_leg(leg)
        for choice in choices:
            self._emit_error(choice, "the request's deadline passed")

    def _resend(self, proxy_id: str, message: m.Resend) -> None:
        outputs = self._log.outputs_from(message.request_id, message.leg, message.choice, message.from_index)
        if outputs:
            self._send(proxy_id, m.Outputs(outputs=outputs))

    def _end_leg(self, leg: Leg) -> None:
        """Nobody wants it any more."""
        for choice in list(leg.choices.values()):
            self._end(choice, abort=True)

    def _end(self, choice: LiveChoice, *, abort: bool) -> None:
        """Takes it out of the node; its blocks follow when the engine and its fetch have let go."""
        is_last = self._legs.remove(choice)
        prompt_id = choice.prompt.request.request_id
        if abort:
            self._engine.abort(choice.engine_id)
        self._metrics.ended(choice.engine_id)
        if not is_last:
            return
        if abort and prompt_id != choice.engine_id:
            self._engine.abort(prompt_id)
        choice.prompt.admission.end()

    # --- engine events ---------------------------------------------------------------------------------------------

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Runs a callback on the event loop; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def engine_events(self, events: Sequence[Event]) -> None:
        """All events of one engine step; outputs leave as one message for each proxy."""
        outputs: dict[str, list[m.RequestOutput]] = defaultdict(list)
        for event in events:
            if isinstance(event, OutputEvent):
                if (choice := self._legs.choice(event.request_id)) is not None:
                    outputs[choice.leg.proxy_id].append(self._output(choice, event))
            elif (prompt := self._legs.prompt(event.request_id)) is None:
                if isinstance(event, FailedEvent) and (choice := self._legs.choice(event.request_id)) is not None:
                    self._fail(choice, event.error)
            elif isinstance(event, ReservedEvent):
                prompt.admission.reserved(event.num_cached_tokens, event.block_ids)
            elif isinstance(event, RevokedEvent):
                prompt.admission.revoked()
            elif isinstance(event, ScoredEvent):
                outputs[prompt.choices[0].leg.proxy_id].append(_scored_output(prompt.choices[0], event))
            elif isinstance(event, SearchEndedEvent):
                self._emit_beams(prompt, event.request)
            elif isinstance(event, FailedEvent):
                for choice in list(prompt.choices):
                    self._fail(choice, event.error)
        for proxy_id, items in outputs.items():
            self._emit(proxy_id, items)

    def _output(self, choice: LiveChoice, event: OutputEvent) -> m.RequestOutput:
        self._metrics.output(event.request_id)
        num_cached = None
        if not choice.is_first_output_sent:
            choice.is_first_output_sent = True
            num_cached = max(event.num_cached_tokens or 0, choice.prompt.admission.num_source_cached_tokens)
        choice.next_index = event.index + 1
        if event.finish_reason is not None:
            self._end(choice, abort=False)
        return m.RequestOutput(
            request_id=choice.leg.request_id,
            leg=choice.leg.number,
            index=event.index,
            choice=choice.choice,
            token_ids=[event.token_id],
            logprobs=None if event.logprobs is None else [event.logprobs],
            finish_reason=None if event.finish_reason is None else event.finish_reason.value,
            stop_reason=event.stop_reason,
            num_cached_tokens=num_cached,
        )

    def _emit_beams(self, prompt: LivePrompt, request: Request) -> None:
        """The best beams, best first: all there is of them, at once."""
        search, choices = request.beam_search, list(prompt.choices)
        assert isinstance(search, BeamSearch)
        found = search.results(max(choice.choice for choice in choices) + 1)
        num_cached = max(request.num_cached_tokens or 0, prompt.admission.num_source_cached_tokens)
        outputs = []
        for choice in choices:
            if choice.choice >= len(found):
                self._fail(choice, f"beam search found {len(found)} answers only")
                continue
            self._end(choice, abort=False)
            outputs.append(_beam_output(choice, found[choice.choice], num_cached))
        if outputs:
            self._emit(choices[0].leg.proxy_id, outputs)

    def _fail(self, choice: LiveChoice, error: str) -> None:
        self._end(choice, abort=False)
        self._emit_error(choice, error)

    def _emit_error(self, choice: LiveChoice, text: str) -> None:
        output = m.RequestOutput(
            request_id=choice.leg.request_id,
            leg=choice.leg.number,
            index=choice.next_index,
            choice=choice.choice,
            finish_reason=FinishReason.ERROR.value,
            error=text[:4096],
        )
        self._emit(choice.leg.proxy_id, [output])

    def _emit(self, proxy_id: str, outputs: list[m.RequestOutput]) -> None:
        sequence = self._send(proxy_id, m.Outputs(outputs=outputs))
        now = self._clock.now()
        for output in outputs:
            self._log.record(output, sequence, now)


def _rejected(message: m.Decode, error: TandemError) -> m.Rejected:
    return m.Rejected(
        request_id=message.request_id,
        leg=message.leg,
        code=error.code,
        message=error.message,
        is_retryable=isinstance(error, OverloadedError | UnavailableError),
        param=error.param or "",
    )


def _scored_output(choice: LiveChoice, event: ScoredEvent) -> m.RequestOutput:
    return m.RequestOutput(
        request_id=choice.leg.request_id,
        leg=choice.leg.number,
        index=0,
        choice=choice.choice,
        prompt_logprobs=event.logprobs,
        prompt_start=event.start,
    )


def _beam_output(choice: LiveChoice, beam: Hypothesis, num_cached_tokens: int) -> m.RequestOutput:
    return m.RequestOutput(
        request_id=choice.leg.request_id,
        leg=choice.leg.number,
        index=0,
        choice=choice.choice,
        token_ids=beam.token_ids,
        logprobs=beam.logprobs,
        finish_reason=beam.finish_reason.value,
        stop_reason=beam.stop_reason,
        num_cached_tokens=num_cached_tokens,
    )
