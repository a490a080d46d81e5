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
from common.engine.events import Event, FailedEvent, OutputEvent, ReservedEvent, RevokedEvent
from common.errors import OverloadedError, TandemError
from common.request import FinishReason, Request
from common.structured_output import Grammar, StructuredOutput
from decode_node.admission import Admission, OpenFetch
from decode_node.grammars import Grammars
from decode_node.metrics import DecodeMetrics
from decode_node.output_log import OutputLog

log = logging.getLogger(__name__)

Send = Callable[[str, m.NodeMessage], int | None]


@dataclass
class _Live:
    """A request of a proxy, from its Decode to its end."""

    proxy_id: str
    request_id: str
    leg: int
    admission: Admission
    timer: asyncio.TimerHandle | None = None
    is_first_output_sent: bool = False


@dataclass(frozen=True)
class _Compiling:
    """A Decode that is answered when its grammar is compiled."""

    proxy_id: str
    leg: int
    task: asyncio.Task[None]


@dataclass(frozen=True)
class DecodeLimits:
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_requests: int
    """Requests held at once, running and waiting; more are rejected, so that the queue grows at the proxy."""


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
        self._queue_seconds = queue_seconds
        self._clock = clock or SystemClock()
        self._metrics = metrics
        self._grammars = grammars
        self._compiling: dict[str, _Compiling] = {}  # by request id
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, _Live] = {}  # by engine request id
        self._current: dict[str, str] = {}  # request id -> engine request id of its newest leg
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
        for live in [live for live in self._live.values() if live.proxy_id == proxy_id]:
            self._end(live, abort=True)

    def drain(self) -> None:
        """No new work from now on."""
        self.is_draining = True

    @property
    def num_live_requests(self) -> int:
        return len(self._live) + len(self._compiling)

    def abort_all(self) -> None:
        for request_id in list(self._compiling):
            self._stop_compiling(request_id)
        for live in list(self._live.values()):
            self._end(live, abort=True)

    # --- requests --------------------------------------------------------------------------------------------------

    def _decode(self, proxy_id: str, message: m.Decode) -> None:
        newest = self._live.get(self._current.get(message.request_id, ""))
        compiling = self._compiling.get(message.request_id)
        if any(earlier is not None and earlier.leg >= message.leg for earlier in (newest, compiling)):
            return  # a repeated message
        if newest is not None:
            self._end(newest, abort=True)
        self._stop_compiling(message.request_id)
        if rejection := self._rejection(message):
            self._send(proxy_id, rejection)
        elif (wanted := message.params.structured_output) is not None:
            task = self._loop.create_task(self._compile(proxy_id, message, wanted))
            self._compiling[message.request_id] = _Compiling(proxy_id, message.leg, task)
        else:
            self._accept(proxy_id, message)

    async def _compile(self, proxy_id: str, message: m.Decode, wanted: StructuredOutput) -> None:
        """Then answers the Decode. Cancelled when nobody waits for the answer any more."""
        try:
            grammar = await self._grammars.compile(wanted)
        except TandemError as error:
            del self._compiling[message.request_id]
            rejection = m.Rejected(
                request_id=message.request_id,
                leg=message.leg,
                code=error.code,
                message=error.message,
                is_retryable=isinstance(error, OverloadedError),
                param=error.param or "",
            )
            self._send(proxy_id, rejection)
        else:
            del self._compiling[message.request_id]
            self._accept(proxy_id, message, grammar)

    def _stop_compiling(self, request_id: str) -> None:
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling.task.cancel()

    def _accept(self, proxy_id: str, message: m.Decode, grammar: Grammar | None = None) -> None:
        self._send(proxy_id, m.Accepted(request_id=message.request_id, leg=message.leg))
        self._log.open(proxy_id, message.request_id, message.leg, len(message.outputs))
        self._admit(proxy_id, message, grammar)

    def _rejection(self, message: m.Decode) -> m.Rejected | None:
        def rejected(code: str, text: str, *, is_retryable: bool) -> m.Rejected:
            return m.Rejected(
                request_id=message.request_id, leg=message.leg, code=code, message=text, is_retryable=is_retryable
            )

        if self.is_draining:
            return rejected("draining", "this node is draining", is_retryable=True)
        if self.num_live_requests >= self._limits.max_requests:
            return rejected("full", f"{self.num_live_requests} requests are held, no more fit", is_retryable=True)
        worst = max(max(message.prompt_token_ids), max(message.outputs, default=0))
        if worst >= self._limits.vocab_size:
            text = f"token id {worst} is out of range, the vocabulary has {self._limits.vocab_size} tokens"
            return rejected("invalid_value", text, is_retryable=False)
        try:
            message.params.check_vocabulary(self._limits.vocab_size)
        except ValueError as error:
            return rejected("invalid_value", str(error), is_retryable=False)
        try:
            self._engine.check_fits(len(message.prompt_token_ids) + len(message.outputs))
        except TandemError as error:
            return rejected(error.code, error.message, is_retryable=False)
        return None

    def _admit(self, proxy_id: str, message: m.Decode, grammar: Grammar | None) -> None:
        request = self._make_request(message, grammar)
        admission = Admission(
            request,
            message.sources,
            engine=self._engine,
            open_fetch=self._open_fetch,
            post=self.post,
            block_size=self._block_size,
            queue_seconds=min(self._queue_seconds, message.deadline_seconds),
        )
        live = _Live(proxy_id, message.request_id, message.leg, admission)
        live.timer = self._loop.call_later(message.deadline_seconds, self._expire, request.request_id)
        self._live[request.request_id] = live
        self._current[message.request_id] = request.request_id
        self._metrics.admitted(request.request_id, has_sources=bool(message.sources))
        admission.start()

    def _make_request(self, message: m.Decode, grammar: Grammar | None) -> Request:
        params = message.params
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._limits.eos_token_ids)
        longest = self._limits.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(message.prompt_token_ids) + params.max_tokens)
        return Request(
            request_id=f"{message.request_id}#{message.leg}",
            prompt_token_ids=message.prompt_token_ids,
            params=params,
            output_token_ids=list(message.outputs),
            stop_token_ids=stops,
            max_num_tokens=longest,
            grammar=grammar,
            cache_salt=message.cache_salt,
            priority=message.priority,
            arrival_time=self._clock.now(),
        )

    def _abort(self, message: m.Abort) -> None:
        compiling = self._compiling.get(message.request_id)
        if compiling is not None and compiling.leg <= message.leg:
            self._stop_compiling(message.request_id)
        live = self._live.get(self._current.get(message.request_id, ""))
        if live is not None and live.leg > message.leg:
            return  # meant for an earlier placement
        self._log.forget(message.request_id)
        if live is not None:
            self._end(live, abort=True)

    def _expire(self, engine_id: str) -> None:
        live = self._live.get(engine_id)
        if live is not None:
            self._end(live, abort=True)
            self._emit_error(live, "the request's deadline passed")

    def _resend(self, proxy_id: str, message: m.Resend) -> None:
        outputs = self._log.outputs_from(message.request_id, message.leg, message.from_index)
        if outputs:
            self._send(proxy_id, m.Outputs(outputs=outputs))

    def _end(self, live: _Live, *, abort: bool) -> None:
        """Takes the request out of the node; its blocks follow when the engine and its fetch have let go."""
        engine_id = live.admission.request.request_id
        del self._live[engine_id]
        if self._current.get(live.request_id) == engine_id:
            del self._current[live.request_id]
        if live.timer is not None:
            live.timer.cancel()
        if abort:
            self._engine.abort(engine_id)
        live.admission.end()
        self._metrics.ended(engine_id)

    # --- engine events ---------------------------------------------------------------------------------------------

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Runs a callback on the event loop; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def engine_events(self, events: Sequence[Event]) -> None:
        """All events of one engine step; outputs leave as one message for each proxy."""
        outputs: dict[str, list[m.RequestOutput]] = defaultdict(list)
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue  # ended meanwhile
            if isinstance(event, OutputEvent):
                outputs[live.proxy_id].append(self._output(live, event))
            elif isinstance(event, ReservedEvent):
                live.admission.reserved(event.num_cached_tokens, event.block_ids)
            elif isinstance(event, RevokedEvent):
                live.admission.revoked()
            elif isinstance(event, FailedEvent):
                self._end(live, abort=False)
                self._emit_error(live, event.error)
        for proxy_id, items in outputs.items():
            self._emit(proxy_id, items)

    def _output(self, live: _Live, event: OutputEvent) -> m.RequestOutput:
        self._metrics.output(event.request_id)
        num_cached = None
        if not live.is_first_output_sent:
            live.is_first_output_sent = True
            num_cached = max(event.num_cached_tokens or 0, live.admission.num_source_cached_tokens)
        if event.finish_reason is not None:
            self._end(live, abort=False)
        return m.RequestOutput(
            request_id=live.request_id,
            leg=live.leg,
            index=event.index,
            token_ids=[event.token_id],
            logprobs=None if event.logprobs is None else [event.logprobs],
            finish_reason=None if event.finish_reason is None else event.finish_reason.value,
            stop_reason=event.stop_reason,
            num_cached_tokens=num_cached,
        )

    def _emit_error(self, live: _Live, text: str) -> None:
        output = m.RequestOutput(
            request_id=live.request_id,
            leg=live.leg,
            index=len(live.admission.request.output_token_ids),
            finish_reason=FinishReason.ERROR.value,
            error=text[:4096],
        )
        self._emit(live.proxy_id, [output])

    def _emit(self, proxy_id: str, outputs: list[m.RequestOutput]) -> None:
        sequence = self._send(proxy_id, m.Outputs(outputs=outputs))
        now = self._clock.now()
        for output in outputs:
            self._log.record(output, sequence, now)
