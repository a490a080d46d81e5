"""One prompt and its choices at the proxy: where they run, what came of them so far, what happens when a node fails.

    wait for a place -> leg 1: Decode ----> Accepted -> Outputs ... -> all choices finished
         ^                      | Rejected, no answer, node lost
         '-- next leg, with the outputs so far of each unfinished choice: it goes on at its next index

All choices are on one node, which computes the prompt once. An output of the current leg is accepted once, at its
choice's next index; the consumer takes what was accepted when it likes. What a slow consumer leaves is bounded by the
request's max_tokens. Knows token ids, no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common import messages as m
from common.clock import Clock, SystemClock
from common.errors import ContextLengthError, InvalidRequestError, OverloadedError, TandemError, UnavailableError
from common.logging import log_event
from common.sampling_params import SamplingParams
from common.text.answer import FinishReason, OutputBatch
from proxy.admission import Admission
from proxy.choice_outputs import ChoiceOutputs
from proxy.prompt_logprobs import PromptLogprobs
from proxy.request_metrics import RequestTrace
from proxy.routing import Need, Route

log = logging.getLogger(__name__)


class RequestTimeoutError(TandemError):
    """The request was not finished within its deadline."""

    status = 504
    code = "timeout"


class NodeFailedError(TandemError):
    """A node gave the request up with an error of its own."""

    status = 500
    code = "node_error"


@dataclass(frozen=True)
class Job:
    """What is to be generated: so many choices of one prompt. params.max_tokens and params.seed are set."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    num_choices: int = 1
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True)
class DispatchLimits:
    """max_lost_legs: nodes that may fail under one request. max_rejected_legs: times that nodes may refuse it.
    accept_seconds: how long a node may take to answer a Decode. request_seconds: deadline for the whole request.
    """

    max_lost_legs: int = 3
    max_rejected_legs: int = 100
    accept_seconds: float = 10.0
    request_seconds: float = 3600.0


class ControlPlane(Protocol):
    """What a dispatcher needs of the cluster."""

    @property
    def admission(self) -> Admission: ...
    def add(self, request: Dispatcher) -> None: ...
    def discard(self, request_id: str) -> None: ...
    def send(self, node_id: str, message: m.ProxyMessage) -> int | None: ...
    def pause(self, node_id: str) -> None: ...


@dataclass(eq=False)
class _Leg:
    """num_seats: those it still takes on its node."""

    route: Route
    num_seats: int
    sequence: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    rejection: m.Rejected | None = None
    lost_reason: str | None = None

    @property
    def node_id(self) -> str:
        return self.route.decode_node.instance_id

    def end(self) -> None:
        self.answered.set()
        self.over.set()


class Dispatcher:
    """One prompt. `start` it, `take` its choices' outputs whenever `wakeup` is set, `close` it in any case.

    wakeup: set when there is something to take; may be shared by several dispatchers.
    """

    def __init__(
        self,
        job: Job,
        cluster: ControlPlane,
        *,
        trace: RequestTrace,
        wakeup: asyncio.Event,
        limits: DispatchLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._trace = trace
        self._wakeup = wakeup
        self._limits = limits or DispatchLimits()
        self._clock = clock or SystemClock()
        self._deadline = self._clock.now() + self._limits.request_seconds
        self.leg = 0
        self._current: _Leg | None = None
        self._avoid: frozenset[str] = frozenset()
        self._num_lost_legs = 0
        self._num_rejected_legs = 0
        has_logprobs = job.params.logprobs is not None
        self._choices = [ChoiceOutputs(has_logprobs=has_logprobs) for _ in range(job.num_choices)]
        self._unfinished = dict(enumerate(self._choices))
        is_asked = job.params.prompt_logprobs is not None
        self._prompt_logprobs = PromptLogprobs(len(job.prompt_token_ids) - 1 if is_asked else 0)
        self._error: TandemError | None = None
        self.num_cached_tokens: int | None = None
        self._driver: asyncio.Task[None] | None = None

    # --- the consumer's side ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._cluster.add(self)
        self._driver = asyncio.create_task(self._drive(), name=f"dispatcher {self.request_id}")

    def take(self, choice: int) -> OutputBatch | None:
        """What came since the last time, or None; raises the error that ended the request, after its last outputs."""
        batch = self._choices[choice].take()
        if self._error is not None:
            if batch is None:
                raise self._error
            self._wakeup.set()  # it is raised the next time
        return batch

    def close_choice(self, choice: int, reason: str) -> None:
        """Nobody wants more of this choice; a node that still works on it is told so at once."""
        if choice in self._unfinished:
            self._end_choice(choice, "stop")
            if not self.is_over:
                self._abort_choice(choice, reason)
        if self.is_over:
            self.close(reason)

    def close(self, reason: str) -> None:
        """Ends it for good: a node that still works on it is told so at once."""
        self._cluster.discard(self.request_id)
        if self._driver is not None:
            self._driver.cancel()
        self._abort_leg(reason)

    @property
    def is_over(self) -> bool:
        return self._error is not None or not self._unfinished

    @property
    def prompt_logprobs(self) -> Sequence[m.TokenLogprobs]:
        """Of the prompt's tokens but the first; complete when the first choice has outputs."""
        return self._prompt_logprobs.entries

    # --- the control plane's side (PlacedRequest) -------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self._job.request_id

    @property
    def node_id(self) -> str | None:
        return self._current.node_id if self._current is not None else None

    @property
    def missing(self) -> dict[int, int]:
        return {number: outputs.next_index for number, outputs in self._unfinished.items()}

    @property
    def decode_sequence(self) -> int:
        return self._current.sequence if self._current is not None else 0

    def accepted(self) -> None:
        if self._current is not None:
            self._current.answered.set()

    def rejected(self, message: m.Rejected) -> None:
        if self._current is not None:
            self._current.rejection = message
            self._current.end()

    def node_lost(self, reason: str) -> None:
        if self._current is not None:
            self._current.lost_reason = reason
            self._current.end()

    def fail(self, error: TandemError) -> None:
        """Ends it with an error that is not its own; the consumer still gets the outputs before it."""
        self._fail(error)
        if self._driver is not None:
            self._driver.cancel()
        self._abort_leg(error.message)

    def output(self, output: m.RequestOutput) -> bool:
        leg = self._current
        if leg is None or self.is_over:
            return True
        leg.answered.set()
        choice = self._unfinished.get(output.choice)
        if choice is None:
            if output.finish_reason is None:
                self._abort_choice(output.choice, "not a choice of this request that goes on")
            return True
        if output.prompt_logprobs is not None:
            return self._prompt_logprobs.add(output.prompt_start, output.prompt_logprobs)
        if output.index > choice.next_index or self._is_too_early(output):
            return False
        self._accept(leg, choice, output)
        self._wakeup.set()
        return True

    def _is_too_early(self, output: m.RequestOutput) -> bool:
        """The prompt's log-probabilities come before the first choice's outputs; these are sent again with them.

        That choice is always the first that a Decode names as long as they are missing: it cannot have ended.
        """
        is_failure = output.finish_reason in ("error", "abort")
        return output.choice == 0 and not self._prompt_logprobs.is_complete and not is_failure

    def _accept(self, leg: _Leg, choice: ChoiceOutputs, output: m.RequestOutput) -> None:
        self._trace.outputs(choice.append(output), output.choice)
        if output.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = min(output.num_cached_tokens, len(self._job.prompt_token_ids))
        if output.finish_reason in ("stop", "length"):
            self._end_choice(output.choice, output.finish_reason)
            if self.is_over:
                leg.end()
        elif output.finish_reason == "error":
            self._fail(NodeFailedError(f"the node failed: {output.error or 'no reason given'}"))
            if len(self._unfinished) == 1:
                leg.end()
            self._abort_leg("another choice failed")
        elif output.finish_reason == "abort":
            self.node_lost("it gave the request up")

    def _end_choice(self, number: int, reason: FinishReason) -> None:
        """Its seat on the node is free: the last one's at the end of the leg, as those of beams are."""
        self._unfinished.pop(number).finish_reason = reason
        leg = self._current
        if leg is not None and leg.num_seats > 1 and self._job.params.beam_search is None:
            leg.num_seats -= 1
            self._cluster.admission.release(leg.route)

    # --- the driver: legs, one after the other ----------------------------------------------------------------------

    async def _drive(self) -> None:
        cause = "new"
        try:
            async with asyncio.timeout(self._remaining_seconds()):
                while not self.is_over:
                    cause = await self._run_leg(cause)
        except TandemError as error:
            self._fail(error)
        except TimeoutError:
            self._abort_leg("deadline")
            limit = self._limits.request_seconds
            self._fail(RequestTimeoutError(f"the request was not finished within {limit:g} s"))
        except Exception:  # the consumer must hear of it, or it would wait for ever
            log.exception("dispatcher_failed request_id=%s", self.request_id)
            self._fail(NodeFailedError("the proxy failed; the log has more"))

    async def _run_leg(self, cause: str) -> str:
        """One placement, from the wait for a place to its end; returns why there must be another one."""
        need = self._need()
        route = await self._cluster.admission.place(need, priority=self._job.priority)
        leg = _Leg(route, need.num_sequences)
        try:
            self._trace.placed(cause)
            self._send_decode(leg)
            await self._wait_for_end(leg)
        finally:
            if self.is_over or leg.over.is_set():
                self._current = None
            self._cluster.admission.release(route, leg.num_seats)
        return self._judge(leg)

    def _need(self) -> Need:
        job, unfinished = self._job, self._unfinished.values()
        num_tokens = len(job.prompt_token_ids) + max(outputs.next_index for outputs in unfinished)
        width = job.params.beam_search.width if job.params.beam_search is not None else 0
        return Need(num_tokens, max(width, len(unfinished)), self._avoid)

    def _send_decode(self, leg: _Leg) -> None:
        self.leg += 1
        job, params = self._job, self._job.params
        self._prompt_logprobs.restart()
        if self._prompt_logprobs.is_complete:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        message = m.Decode(
            request_id=job.request_id,
            leg=self.leg,
            prompt_token_ids=list(job.prompt_token_ids),
            params=params,
            choices=[m.ChoiceSoFar(number, list(outputs.token_ids)) for number, outputs in self._unfinished.items()],
            sources=list(leg.route.sources),
            cache_salt=job.cache_salt,
            priority=job.priority,
            deadline_seconds=self._remaining_seconds(),
        )
        self._current = leg
        sequence = self._cluster.send(leg.node_id, message)
        if sequence is None:
            self.node_lost("it cannot be reached")
        else:
            leg.sequence = sequence

    async def _wait_for_end(self, leg: _Leg) -> None:
        try:
            async with asyncio.timeout(self._limits.accept_seconds):
                await leg.answered.wait()
        except TimeoutError:
            leg.lost_reason = f"it did not answer within {self._limits.accept_seconds:g} s"
            self._abort_leg("no answer")
        await leg.over.wait()

    def _judge(self, leg: _Leg) -> str:
        if leg.rejection is not None:
            self._judge_rejection(leg.node_id, leg.rejection)
            return "rejected"
        if leg.lost_reason is not None:
            self._judge_loss(leg.node_id, leg.lost_reason)
        return "lost"

    def _judge_rejection(self, node_id: str, rejection: m.Rejected) -> None:
        if not rejection.is_retryable:
            raise _refusal(rejection)
        self._num_rejected_legs += 1
        self._cluster.pause(node_id)
        if self._num_rejected_legs >= self._limits.max_rejected_legs:
            raise OverloadedError(f"nodes refused the request {self._num_rejected_legs} times: {rejection.message}")

    def _judge_loss(self, node_id: str, reason: str) -> None:
        self._num_lost_legs += 1
        self._avoid |= {node_id}
        self._cluster.pause(node_id)
        log_event(log, "leg_lost", request_id=self.request_id, leg=self.leg, node=node_id, reason=reason)
        if self._num_lost_legs >= self._limits.max_lost_legs:
            raise UnavailableError(f"{self._num_lost_legs} nodes failed while they worked on this request")

    def _fail(self, error: TandemError) -> None:
        if not self.is_over:
            self._error = error
        self._wakeup.set()

    def _abort_choice(self, choice: int, reason: str) -> None:
        if self._current is not None:
            message = m.Abort(request_id=self.request_id, leg=self.leg, choice=choice, reason=reason)
            self._cluster.send(self._current.node_id, message)

    def _abort_leg(self, reason: str) -> None:
        leg, self._current = self._current, None
        if leg is not None and not leg.over.is_set():
            self._cluster.send(leg.node_id, m.Abort(request_id=self.request_id, leg=self.leg, reason=reason))
            leg.end()

    def _remaining_seconds(self) -> float:
        return max(0.0, self._deadline - self._clock.now())


def _refusal(rejection: m.Rejected) -> TandemError:
    if rejection.code == ContextLengthError.code:
        return ContextLengthError(rejection.message)
    return InvalidRequestError(rejection.message, param=rejection.param or None)
