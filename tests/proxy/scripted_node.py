"""A node that plays a script over the real control socket. No model, no torch."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import zmq
import zmq.asyncio

from common import messages as m
from common.kv_layout import KVLayout

MODEL = "tiny"
CONTEXT = 2048
EOS = 2
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="tiny")
STATS = m.NodeStats(num_blocks=100, num_free_blocks=100)
PATIENCE = 5.0

_M = TypeVar("_M", bound=m.ProxyMessage)


@dataclass(frozen=True)
class Wait:
    """A step of a script: stop here until the test sets `node.resume`, which is used up by it."""


Step = list[int] | Wait
Steps = Sequence[Step]
Script = Callable[[m.Decode], Steps | dict[int, Steps]]
"""Steps of all choices alike, or of each by its number."""


@dataclass(eq=False)
class LiveChoice:
    """outputs: all, those that came with the Decode included; num_before: of these how many those are."""

    number: int
    outputs: list[int]
    num_before: int
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class Live:
    decode: m.Decode
    choices: dict[int, LiveChoice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = {c.choice: LiveChoice(c.choice, list(c.outputs), len(c.outputs)) for c in self.decode.choices}


class ScriptedNode:
    """Plays one node. Its script says what tokens come for a Decode; a resumed one goes on where its outputs end.

    What it received is in `received`; `expect(kind)` waits for the next message of a kind.
    """

    def __init__(self, endpoint: str, script: Script, *, instance_id: str, hello: m.Hello) -> None:
        self.instance_id = instance_id
        self.script = script
        self.hello = hello
        self.stats = hello.stats
        self.received: list[m.ProxyMessage] = []
        self.live: dict[str, Live] = {}
        self.resume = asyncio.Event()
        self.is_accepting = True
        self.logprobs = fake_logprobs
        self.rejection: tuple[str, str, bool] | None = None
        self.knows_requests = True
        self.proxy_id = ""
        self.is_silent = False
        """If set, no Status is sent."""
        self.losses: random.Random | None = None
        """If set, messages are lost by its dice, one of ten."""
        self._sent = 0
        self._seen = 0
        self._num_to_drop = 0
        self._arrived = asyncio.Condition()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> ScriptedNode:
        self._spawn(self._receive())
        await self.send(self.hello)
        await self.expect(m.Welcome)
        self._spawn(self._beat())
        return self

    async def die(self) -> None:
        """Silence, as after kill -9."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def send(self, message: m.NodeMessage, *, receiver: str | None = None) -> None:
        self._sent += 1
        if self._num_to_drop:
            self._num_to_drop -= 1
            return
        if self.losses and not isinstance(message, m.Hello) and self.losses.random() < 0.1:
            return
        receiver = self.proxy_id if receiver is None else receiver
        envelope = m.Envelope(self.instance_id, receiver, self._sent, self._seen)
        await self._socket.send_multipart(m.encode(envelope, message))

    async def send_raw(self, frames: list[bytes]) -> None:
        await self._socket.send_multipart(frames)

    def drop_next(self, count: int = 1) -> None:
        """The next messages get a sequence and are lost."""
        self._num_to_drop = count

    async def expect(self, kind: type[_M], count: int = 1) -> _M:
        """The count-th message of this kind, waiting for it."""

        def found() -> list[_M]:
            return [message for message in self.received if isinstance(message, kind)]

        async with asyncio.timeout(PATIENCE), self._arrived:
            await self._arrived.wait_for(lambda: len(found()) >= count)
        return found()[count - 1]

    def count(self, kind: type[m.ProxyMessage]) -> int:
        return sum(isinstance(message, kind) for message in self.received)

    async def output(self, decode: m.Decode, **fields: Any) -> None:
        fields = {"request_id": decode.request_id, "leg": decode.leg, **fields}
        await self.send(m.Outputs(outputs=[m.RequestOutput(**fields)]))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if not self.is_silent:
                await self.send(m.Status(stats=self.stats))

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            envelope, message = m.decode_from_proxy(frames)
            self.proxy_id, self._seen = envelope.sender, envelope.sequence
            await self._handle(message)
            async with self._arrived:
                self.received.append(message)
                self._arrived.notify_all()

    async def _handle(self, message: m.ProxyMessage) -> None:
        if isinstance(message, m.Decode) and self.is_accepting:
            self._spawn(self._serve(message))
        elif isinstance(message, m.Abort) and message.choice is None:
            self.live.pop(message.request_id, None)
        elif isinstance(message, m.Abort) and (live := self.live.get(message.request_id)):
            live.choices.pop(message.choice, None)
        elif isinstance(message, m.Rehello):
            await self.send(replace_hello(self.hello, self._snapshot()))
        elif isinstance(message, m.Resend) and (live := self.live.get(message.request_id)):
            await self._send_again(live, message)

    async def _send_again(self, live: Live, message: m.Resend) -> None:
        if message.choice == 0 and message.from_index == 0:
            await self._send_prompt_logprobs(live.decode)
        if (choice := live.choices.get(message.choice)) is None:
            return
        fields: dict[str, Any] = {"index": message.from_index, "token_ids": choice.outputs[message.from_index :]}
        if live.decode.params.logprobs is not None:
            fields["logprobs"] = self._logprobs(live, choice, message.from_index)
        await self.output(live.decode, choice=choice.number, finish_reason=choice.finish_reason, **fields)

    @property
    def running(self) -> list[Live]:
        return [live for live in self.live.values() if not all(c.finish_reason for c in live.choices.values())]

    def _snapshot(self) -> list[m.LiveRequest]:
        if not self.knows_requests:
            return []
        return [m.LiveRequest(i, live.decode.leg) for i, live in self.live.items()]

    async def _serve(self, decode: m.Decode) -> None:
        if self.rejection is not None:
            code, text, is_retryable = self.rejection
            fields = {"code": code, "message": text, "is_retryable": is_retryable}
            await self.send(m.Rejected(request_id=decode.request_id, leg=decode.leg, **fields))
            return
        live = self.live[decode.request_id] = Live(decode)
        await self.send(m.Accepted(request_id=decode.request_id, leg=decode.leg))
        await self._send_prompt_logprobs(decode)
        script = self.script(decode)
        by_choice = script if isinstance(script, dict) else dict.fromkeys(live.choices, script)
        await self._play(live, {choice: by_choice[number] for number, choice in live.choices.items()})

    async def _play(self, live: Live, scripts: dict[LiveChoice, Steps]) -> None:
        """A step of all choices goes into one message, as an engine's does."""
        num_known = {choice: choice.num_before for choice in scripts}
        for steps in itertools.zip_longest(*scripts.values(), fillvalue=[]):
            if any(isinstance(step, Wait) for step in steps):
                await self.resume.wait()
                self.resume.clear()
            outputs = []
            for choice, step in zip(scripts, steps, strict=True):
                if isinstance(step, Wait):
                    continue
                new, num_known[choice] = step[num_known[choice] :], max(0, num_known[choice] - len(step))
                if new and live.choices.get(choice.number) is choice and choice.finish_reason is None:
                    outputs.append(self._next(live, choice, new))
            if self.live.get(live.decode.request_id) is not live:
                return
            if outputs:
                await self.send(m.Outputs(outputs=outputs))

    def _next(self, live: Live, choice: LiveChoice, token_ids: list[int]) -> m.RequestOutput:
        decode, params = live.decode, live.decode.params
        index = len(choice.outputs)
        room = (params.max_tokens or CONTEXT) - index
        token_ids = token_ids[:room]
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        end = next((i for i, token_id in enumerate(token_ids) if token_id in stops), None)
        token_ids = token_ids if end is None else token_ids[: end + 1]
        finish: Any = "stop" if end is not None else "length" if len(token_ids) == room else None
        choice.outputs += token_ids
        choice.finish_reason = finish  # and stays listed: the last outputs may be lost
        return m.RequestOutput(
            request_id=decode.request_id,
            leg=decode.leg,
            choice=choice.number,
            index=index,
            token_ids=token_ids,
            logprobs=self._logprobs(live, choice, index) if params.logprobs is not None else None,
            finish_reason=finish,
            num_cached_tokens=3 + choice.number if index == choice.num_before else None,
        )

    def _logprobs(self, live: Live, choice: LiveChoice, index: int) -> list[m.TokenLogprobs]:
        count = live.decode.params.logprobs
        assert count is not None
        return [self.logprobs(choice.number, token_id, count) for token_id in choice.outputs[index:]]

    async def _send_prompt_logprobs(self, decode: m.Decode) -> None:
        """In pieces of two tokens, if they are wanted."""
        if (count := decode.params.prompt_logprobs) is None:
            return
        entries = fake_prompt_logprobs(decode.prompt_token_ids, count)
        for start in range(0, len(entries), 2):
            await self.output(decode, index=0, prompt_logprobs=entries[start : start + 2], prompt_start=1 + start)


def fake_prompt_logprobs(token_ids: list[int], count: int) -> list[m.TokenLogprobs]:
    """Of the tokens but the first: the one at place p has -p and rank 10 + p; 100 is the most likely one everywhere."""
    top = range(100, 100 + count)
    return [
        m.TokenLogprobs(-float(place), list(top), [-0.25] * count, 10 + place) for place in range(1, len(token_ids))
    ]


def fake_logprobs(_choice: int, token_id: int, count: int) -> m.TokenLogprobs:
    """The second most likely token is masked: minus infinity."""
    ids = [token_id, *range(100, 120)][:count]
    return m.TokenLogprobs(-0.5, ids, [-0.5, float("-inf"), *[-2.0] * 20][:count])


def replace_hello(hello: m.Hello, live: list[m.LiveRequest]) -> m.Hello:
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return m.Hello(**{**fields, "live_requests": live})


def make_hello(**changes: Any) -> m.Hello:
    fields: dict[str, Any] = {
        "protocol_version": m.PROTOCOL_VERSION,
        "role": "decode",
        "model": MODEL,
        "layout": LAYOUT,
        "max_model_len": CONTEXT,
        "vocab_size": 512,
        "max_num_seqs": 8,
        "fetch_endpoints": ["tcp://127.0.0.1:1"],
        "stats": STATS,
    }
    return m.Hello(**{**fields, **changes})
