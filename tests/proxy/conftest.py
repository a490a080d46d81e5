"""A proxy on a real port, with nodes that play a script. No model, no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import openai
import pytest
import zmq
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from yarl import URL

from common.checkpoints.sampling_defaults import SamplingDefaults
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import TextTokenizer
from proxy.app import CLUSTER, AppSettings, build_app
from proxy.cluster import Cluster
from proxy.node_pool import NodePool
from proxy.serving_model import ModelLimits, ServingModel
from tests.proxy.scripted_node import EOS, MODEL, PATIENCE, Script, ScriptedNode, Wait, make_hello

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
        assert all(node.num_own_sequences == 0 for node in self.cluster.pool)


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
