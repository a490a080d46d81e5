"""The HTTP endpoints: from a request's bytes to an answer, streamed or whole.

    parse -> render and tokenize -> check limits -> generate -> format

Errors are raised; `middleware` gives them their shape.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import ModelNotFoundError, TandemError
from common.metrics import exposition
from proxy.best_of import select_best
from proxy.cluster import Cluster
from proxy.generation import Generation, Generator
from proxy.middleware import error_body, request_id_of
from proxy.node_pool import Node
from proxy.openai_response import ChatFormat, ChoiceText, CompletionFormat, PromptTokens, ReplyFormat, ReplyHead
from proxy.openai_schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from proxy.serving_model import ServingModel
from proxy.sse import EventStream

_encode_json = msgspec.json.Encoder().encode


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode_json(body), status=status, content_type="application/json")


def package_version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Routes:
    """All endpoints. stall_seconds: how long a client may leave its stream unread."""

    model: ServingModel
    cluster: Cluster
    generator: Generator
    registry: CollectorRegistry
    is_stopping: Callable[[], bool]
    started: int
    stall_seconds: float = 120.0

    def table(self) -> Sequence[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.retrieve_model),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/version", self.version),
            web.get("/nodes", self.nodes),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    # --- generation -------------------------------------------------------------------------------------------------

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        arrived = self.generator.now()
        body = parse_body(ChatBody, await request.read())
        self.model.check_name(body.model)
        prompt = await self._encode_chat(body.messages)
        self.model.check_prompt_length(len(prompt), "messages")
        generation = self.generator.start(
            request_id_of(request), arrived, body, [prompt], default_max_tokens=None, continues_prompt=False
        )
        shape = ChatFormat(
            self._head("chatcmpl"),
            self.model.tokenizer,
            wants_logprobs=body.num_logprobs is not None,
            returns_token_ids=body.return_token_ids,
            includes_usage=body.includes_usage,
        )
        return await self._answer(request, body, generation, shape)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived = self.generator.now()
        body = parse_body(CompletionBody, await request.read())
        self.model.check_name(body.model)
        prompts = [await self._encode_prompt(prompt) for prompt in body.prompts]
        generation = self.generator.start(
            request_id_of(request),
            arrived,
            body,
            prompts,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            continues_prompt=True,
        )
        shape = CompletionFormat(
            self._head("cmpl"),
            self.model.tokenizer,
            wants_logprobs=body.num_logprobs is not None,
            returns_token_ids=body.return_token_ids,
            includes_usage=body.includes_usage,
        )
        return await self._answer(request, body, generation, shape)

    async def _encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        text = self.model.render_chat(
            [message.for_template() for message in messages], add_generation_prompt=add_generation_prompt
        )
        return await self.model.encode(text, add_special_tokens=False, param="messages")

    async def _encode_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = await self.model.encode(prompt, add_special_tokens=True, param="prompt")
        else:
            self.model.check_token_ids(prompt, "prompt")
        self.model.check_prompt_length(len(prompt), "prompt")
        return prompt

    def _head(self, prefix: str) -> ReplyHead:
        return ReplyHead(f"{prefix}-{uuid.uuid4().hex}", self.model.name, int(time.time()))

    async def _answer(
        self, request: web.Request, body: GenerationBody, generation: Generation, shape: ReplyFormat
    ) -> web.StreamResponse:
        try:
            if body.stream:
                return await self._stream(request, generation, shape, includes_usage=body.includes_usage)
            return await self._reply(body, generation, shape)
        finally:
            generation.close()

    async def _reply(self, body: GenerationBody, generation: Generation, shape: ReplyFormat) -> web.Response:
        choices = [ChoiceText() for _ in range(generation.num_choices)]
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        best = select_best(choices, body.num_generated, body.n)
        has_prompts = body.prompt_logprobs is not None
        prompts = [PromptTokens(p.token_ids, p.logprobs) for p in generation.prompts] if has_prompts else []
        return json_response(shape.reply(best, generation.usage, prompts))

    async def _stream(
        self, request: web.Request, generation: Generation, shape: ReplyFormat, *, includes_usage: bool
    ) -> web.StreamResponse:
        stream = EventStream(request, stall_seconds=self.stall_seconds)
        opened: set[int] = set()
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for index, delta in deltas:
                    if not opened:  # not before: an error until now has a status of its own
                        await stream.open()
                    opening = shape.opening(index) if index not in opened else None
                    opened.add(index)
                    await stream.send(*([opening] if opening else []), shape.chunk(index, delta))
            if includes_usage:
                await stream.send(shape.usage_chunk(generation.usage))
            await stream.finish()
        except TandemError as error:
            if not opened:
                raise
            await stream.send(error_body(error))
            await stream.finish()
        except ConnectionResetError:  # the client is gone; nobody reads what we would say
            pass
        return stream.response

    # --- models and text --------------------------------------------------------------------------------------------

    async def models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def retrieve_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self.model.name:
            raise ModelNotFoundError(f"the model {name!r} does not exist; this server has {self.model.name!r}")
        return json_response(self._model_entry())

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.started,
            "owned_by": "tandem",
            "root": self.model.name,
            "parent": None,
            "max_model_len": self.model.max_model_len,
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        body = parse_body(TokenizeBody, await request.read())
        self.model.check_name(body.model)
        if body.messages is not None:
            tokens = await self._encode_chat(body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            tokens = await self.model.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens, param="prompt"
            )
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.model.max_model_len})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = parse_body(DetokenizeBody, await request.read())
        self.model.check_name(body.model)
        self.model.check_token_ids(body.tokens, "tokens")
        return json_response({"prompt": self.model.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    # --- probes -----------------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        """The process answers. Whether requests can be served is /ready's to say."""
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        if self.is_stopping():
            return json_response({"status": "not ready", "reason": "the proxy is stopping"}, status=503)
        if not self.cluster.pool.is_ready:
            return json_response({"status": "not ready", "reason": "no decode node is ready"}, status=503)
        return json_response({"status": "ready"})

    async def metrics(self, _: web.Request) -> web.Response:
        body, content_type = exposition(self.registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": package_version()})

    # --- operation --------------------------------------------------------------------------------------------------

    async def nodes(self, _: web.Request) -> web.Response:
        """The nodes that are joined, as their last Status says, for `tandem status`."""
        pool = self.cluster.pool
        body = {
            "model": self.model.name,
            "is_ready": pool.is_ready and not self.is_stopping(),
            "num_queued": self.cluster.admission.num_waiting,
            "nodes": [_node_entry(node) for node in pool],
        }
        return json_response(body)

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Empties the prefix cache of every node; nothing that was cached before is found after the answer."""
        return json_response({"status": "ok", "num_nodes": await self.cluster.reset_prefix_caches()})


def _node_entry(node: Node) -> dict[str, Any]:
    health = "draining" if node.is_draining else "paused" if node.is_paused else "joined"
    return {
        "node": node.instance_id,
        "role": node.role,
        "health": health,
        "max_num_seqs": node.hello.max_num_seqs,
        "stats": msgspec.to_builtins(node.stats),
    }
