"""The requests that a decode node holds for its proxies: what a Decode becomes in the engine, and what is left of it.

    Decode -> Leg, a placement of a request ---> LiveChoice for each answer that is still to come
                  '--> LivePrompt for each request that the engine was given

Choices without outputs are one request of the engine, which forks; those that have outputs (the request moved here) are
requests of their own, and share what the prefix cache has of them. A beam search is one request. Pure bookkeeping.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from common import messages as m
from common.engine.new_request import AnswerLimits, new_prompt, new_request
from common.request import Request
from decode_node.admission import Admission


@dataclass(frozen=True)
class DecodeLimits(AnswerLimits):
    """max_requests: sequences held at once, running and waiting; more are rejected, so that the queue grows at the
    proxy."""

    max_requests: int


@dataclass(eq=False)
class LiveChoice:
    """An answer that is being generated. engine_id: of its request in the engine, once it is by itself."""

    leg: Leg
    prompt: LivePrompt
    choice: int
    engine_id: str
    next_index: int
    is_first_output_sent: bool = False


@dataclass(eq=False)
class LivePrompt:
    """A request that the engine was given, and the answers that are to come of it."""

    request: Request
    admission: Admission
    choices: list[LiveChoice] = field(default_factory=list)


@dataclass(eq=False)
class Leg:
    """A placement of a proxy's request, from its Decode to its end."""

    proxy_id: str
    request_id: str
    number: int
    choices: dict[int, LiveChoice] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Legs:
    """All that is live, found by the proxy's request id and by the engine's."""

    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}
        self._prompts: dict[str, LivePrompt] = {}
        self._choices: dict[str, LiveChoice] = {}

    def __len__(self) -> int:
        """Answers that are still to come."""
        return len(self._choices)

    def all(self) -> list[Leg]:
        return list(self._legs.values())

    def get(self, request_id: str) -> Leg | None:
        return self._legs.get(request_id)

    def choice(self, engine_id: str) -> LiveChoice | None:
        return self._choices.get(engine_id)

    def prompt(self, engine_id: str) -> LivePrompt | None:
        return self._prompts.get(engine_id)

    def add(self, leg: Leg) -> None:
        self._legs[leg.request_id] = leg

    def place(self, leg: Leg, request: Request, admission: Admission, choices: list[int]) -> LivePrompt:
        """`choices`: the numbers of the answers that are to come of this request."""
        ids = {choice.choice: choice.request_id for choice in request.choices or [request]}
        if len(choices) > len(ids):  # a beam search is over for all of them at once
            ids = {}
        prompt = self._prompts[request.request_id] = LivePrompt(request, admission)
        for number in choices:
            engine_id = ids.get(number, f"{request.request_id}/{number}")
            live = LiveChoice(leg, prompt, number, engine_id, len(request.output_token_ids))
            prompt.choices.append(live)
            leg.choices[number] = self._choices[engine_id] = live
        return prompt

    def remove(self, choice: LiveChoice) -> bool:
        """True if no other answer is to come of its prompt."""
        leg, prompt = choice.leg, choice.prompt
        prompt.choices.remove(choice)
        del self._choices[choice.engine_id], leg.choices[choice.choice]
        if not leg.choices and self._legs.get(leg.request_id) is leg:
            del self._legs[leg.request_id]
            if leg.timer is not None:
                leg.timer.cancel()
        if not prompt.choices:
            del self._prompts[prompt.request.request_id]
        return not prompt.choices


def make_requests(message: m.Decode, limits: DecodeLimits, arrival_time: float) -> list[Request]:
    """What the engine is given for it: one request that all choices without outputs come of, one for each other."""
    name, tokens, params = f"{message.request_id}#{message.leg}", message.prompt_token_ids, message.params
    fresh = [so_far.choice for so_far in message.choices if not so_far.outputs or params.beam_search is not None]
    made = [new_prompt(name, tokens, params, limits, choices=fresh)] if fresh else []
    for so_far in message.choices:
        if so_far.choice not in fresh:
            request_id = f"{name}/{so_far.choice}" if len(message.choices) > 1 else name
            moved = new_request(
                request_id, tokens, params, limits, choice=so_far.choice, output_token_ids=so_far.outputs
            )
            made.append(moved)
    for request in made:
        for one in (request, *request.choices):
            one.cache_salt, one.priority, one.arrival_time = message.cache_salt, message.priority, arrival_time
    return made


def numbers_of(request: Request, message: m.Decode) -> list[int]:
    """Of the answers that come of one of its requests."""
    if message.params.beam_search is not None:
        return [so_far.choice for so_far in message.choices]
    return [choice.choice for choice in request.choices or [request]]
