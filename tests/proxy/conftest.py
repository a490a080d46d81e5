"""A proxy on a real port and nodes that play a script over the real control socket. No model, no torch."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import aiohttp
import openai
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from yarl import URL

from common import messages as m
from common.kv_layout import KVLayout
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import TextTokenizer
from proxy.app import CLUSTER, AppSettings, build_app
from proxy.cluster import Cluster
from proxy.node_pool import NodePool
from proxy.sampling_defaults import SamplingDefaults
from proxy.serving_model import ModelLimits, ServingModel

MODEL = "tiny"
CONTEXT = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="tiny")
STATS = m.NodeStats(num_blocks=100, num_free_blocks=100)
PATIENCE = 5.0

_M = TypeVar("_M", bound=m.ProxyMessage)


@dataclass(frozen=True)
class Wait:
    """A step of a script: stop here until the test sets `node.resume`, which is used up by it."""


Step = list[int] | Wait
Script = Callable[[m.Decode], Sequence[Step]]


@dataclass
class Live:
    decode: m.Decode
    outputs: list[int] = field(default_factory=list)
    """All outputs, those that came with the Decode included."""
    finish_reason: Literal["stop", "length"] | None = None


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
        elif isinstance(message, m.Abort):
            self.live.pop(message.request_id, None)
        elif isinstance(message, m.Rehello):
            await self.send(replace_hello(self.hello, self._snapshot()))
        elif isinstance(message, m.Resend) and (live := self.live.get(message.request_id)):
            rest = live.outputs[message.from_index :]
            fields = {"index": message.from_index, "token_ids": rest, "finish_reason": live.finish_reason}
            await self.output(live.decode, **fields)

    @property
    def running(self) -> list[Live]:
        return [live for live in self.live.values() if live.finish_reason is None]

    def _snapshot(self) -> list[m.LiveRequest]:
        if not self.knows_requests:
            return []
        return [m.LiveRequest(i, live.decode.leg, len(live.outputs)) for i, live in self.live.items()]

    async def _serve(self, decode: m.Decode) -> None:
        if self.rejection is not None:
            code, text, is_retryable = self.rejection
            fields = {"code": code, "message": text, "is_retryable": is_retryable}
            await self.send(m.Rejected(request_id=decode.request_id, leg=decode.leg, **fields))
            return
        live = self.live[decode.request_id] = Live(decode, list(decode.outputs))
        await self.send(m.Accepted(request_id=decode.request_id, leg=decode.leg))
        num_known = len(decode.outputs)
        for step in self.script(decode):
            if isinstance(step, Wait):
                if len(live.outputs) >= num_known:
                    await self.resume.wait()
                    self.resume.clear()
                continue
            new, num_known = step[num_known:], max(0, num_known - len(step))
            if new and not await self._emit(live, new):
                return

    async def _emit(self, live: Live, token_ids: list[int]) -> bool:
        """False when the request has ended."""
        decode, params = live.decode, live.decode.params
        if self.live.get(decode.request_id) is not live:
            return False
        room = (params.max_tokens or CONTEXT) - len(live.outputs)
        token_ids = token_ids[:room]
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        end = next((i for i, token_id in enumerate(token_ids) if token_id in stops), None)
        token_ids = token_ids if end is None else token_ids[: end + 1]
        finish = "stop" if end is not None else "length" if len(token_ids) == room else None
        fields: dict[str, Any] = {"index": len(live.outputs), "token_ids": token_ids, "finish_reason": finish}
        if len(live.outputs) == len(decode.outputs):
            fields["num_cached_tokens"] = 3
        if params.logprobs is not None:
            fields["logprobs"] = [fake_logprobs(token_id, params.logprobs) for token_id in token_ids]
        live.outputs += token_ids
        live.finish_reason = finish  # and stays listed: the last outputs may be lost
        await self.output(decode, **fields)
        return finish is None


def fake_logprobs(token_id: int, count: int) -> m.TokenLogprobs:
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


class Proxy:
    """A running proxy, its clients, and the nodes that were started for it."""

    def __init__(self, app: web.Application, runner: web.AppRunner, tokenizer: TextTokenizer) -> None:
        self.app = app
        self.runner = runner
        self.tokenizer = tokenizer
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        self.http = aiohttp.ClientSession(self.url)
        self.nodes: list[ScriptedNode] = []

    @property
    def cluster(self) -> Cluster:
        return self.app[CLUSTER]

    async def node(self, script: Script | None = None, *, wait: bool = True, **changes: Any) -> ScriptedNode:
        number = len(self.nodes)
        hello = make_hello(**changes)
        node = ScriptedNode(
            self.cluster.endpoint, script or (lambda _: []), instance_id=f"{hello.role}-{number}", hello=hello
        )
        self.nodes.append(node)
        return await node.start() if wait else node

    def ids(self, *pieces: str) -> list[list[int]]:
        """A script: the tokens of each piece come together."""
        return [self.tokenizer.encode(piece) for piece in pieces]

    def bytes_ids(self, data: bytes) -> list[list[int]]:
        """A script of one token for each byte."""
        by_byte = {self.tokenizer.piece(i).data: i for i in reversed(range(self.tokenizer.num_tokens))}
        return [[by_byte[bytes([byte])]] for byte in data]

    def sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json={"model": MODEL, **body}) as reply:
            return reply.status, json.loads(await reply.read(), parse_constant=refuse_constant)

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, reply = await self.post("/v1/completions", {"prompt": "x", "max_tokens": 100, **body})
        assert status == 200, reply
        return reply

    async def chat(self, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hi"}]
        status, reply = await self.post("/v1/chat/completions", {"messages": messages, **body})
        assert status == 200, reply
        return reply

    async def stream(self, path: str = "/v1/completions", **body: Any) -> Stream:
        """The whole stream."""
        default = {"prompt": "x", "max_tokens": 100} if path == "/v1/completions" else CHAT_BODY
        async with self.http.post(path, json={"model": MODEL, "stream": True, **default, **body}) as reply:
            return Stream(reply.status, dict(reply.headers), await reply.text())

    async def frames(self, path: str = "/v1/completions", **body: Any) -> AsyncIterator[dict[str, Any]]:
        """A stream's frames as they come; leaving the loop hangs up."""
        default = {"prompt": "x", "max_tokens": 100} if path == "/v1/completions" else CHAT_BODY
        async with self.http.post(path, json={"model": MODEL, "stream": True, **default, **body}) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def request(self, method: str, path: str, **options: Any) -> Any:
        """A request whose path is sent as it is written."""
        return self.http.request(method, URL(self.url + path, encoded=True), **options)

    async def metrics(self) -> dict[str, float]:
        """Every series of /metrics by its name and labels."""
        async with self.http.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def close(self) -> None:
        for node in self.nodes:
            with suppress(zmq.ZMQError):
                await node.die()
        await self.http.close()
        await self.runner.cleanup()
        assert self.cluster.num_requests == 0
        assert all(node.num_own_requests == 0 for node in self.cluster.pool)


CHAT_BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def refuse_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@dataclass
class Stream:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def data(self) -> list[str]:
        return [line.removeprefix("data: ") for line in self.text.splitlines() if line]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        assert self.data[-1] == "[DONE]"
        return [json.loads(line, parse_constant=refuse_constant) for line in self.data[:-1]]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", []) if choice["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        found = [c["text"] if "text" in c else c["delta"].get("content", "") for c in self.choices(index)]
        return [text for text in found if text]

    def joined(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    @property
    def finish_reason(self) -> str | None:
        return self.choices()[-1]["finish_reason"]


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    corpus = ["the quick brown fox jumps over the lazy dog", "red blue green END! fine more", "Hello there, world"]
    made.train_from_iterator(corpus * 20, trainer)
    return TextTokenizer(made)


StartProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
async def start_proxy(tokenizer: TextTokenizer) -> AsyncIterator[StartProxy]:
    """Starts proxies with short heartbeats and leases; settings may be changed by name."""
    async with AsyncExitStack() as stack:

        async def start(*, sampling_defaults: SamplingDefaults | None = None, **changes: Any) -> Proxy:
            settings = AppSettings("tcp://127.0.0.1:*", heartbeat_seconds=0.05, lease_seconds=0.4)
            pool = NodePool(lease_seconds=0.4, vocab_size=512)
            limits = ModelLimits(vocab_size=512, max_model_len=4096, eos_token_ids=frozenset({EOS}))
            template = ChatTemplate(CHATML)
            model = ServingModel(MODEL, tokenizer, template, limits, lambda: pool.max_model_len, sampling_defaults)
            app = await build_app(model, pool, replace(settings, **changes))
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            proxy = Proxy(app, runner, tokenizer)
            stack.push_async_callback(proxy.close)
            return proxy

        yield start


@pytest.fixture
async def scripted_node() -> AsyncIterator[Callable[..., Awaitable[ScriptedNode]]]:
    """Starts a node for any proxy, also one in another process."""
    async with AsyncExitStack() as stack:

        async def start(endpoint: str, script: Script, **changes: Any) -> ScriptedNode:
            node = ScriptedNode(endpoint, script, instance_id="scripted", hello=make_hello(**changes))
            stack.push_async_callback(node.die)
            return await node.start()

        yield start


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    return await start_proxy()


async def _until(condition: Callable[[], object]) -> None:
    """Lets the loop turn until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  (nothing sets an event when the proxy's state changes)
            await asyncio.sleep(0)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    return _until


@pytest.fixture
def wait() -> Wait:
    return Wait()
