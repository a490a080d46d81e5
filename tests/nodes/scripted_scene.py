"""A decode node with everything around it scripted: its engine, its fetches, its compiler and its proxy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import messages as m
from common.clock import ManualClock
from common.engine.events import OutputEvent
from common.errors import ContextLengthError, InvalidRequestError
from common.kv_layout import KVLayout
from common.metrics import Metrics
from common.request import FinishReason, Request
from common.sampling_params import SamplingParams
from common.structured_output import StructuredOutput
from decode_node.grammars import Grammars
from decode_node.legs import DecodeLimits
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from kvtransfer.store import FetchListener, FetchRequest

LAYOUT = KVLayout(2, 1, 4, 16, "float32", "tiny")
PROXY = "proxy-1"


class ScriptedEngine:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.num_resets = 0
        self.prompt_rows: list[tuple[str, int, int]] = []

    def check_fits(self, request: Request) -> None:
        if request.num_tokens > 100:
            raise ContextLengthError(f"{request.num_tokens} tokens, the limit is 100")

    def add(self, request: Request) -> None:
        for one in (request, *request.choices):
            self.requests[one.request_id] = one

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def release_reservation(self, request_id: str) -> None:
        self.released.append(request_id)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def adopt(self, request_id: str, num_computed_tokens: int) -> None: ...
    def cancel_remote(self, request_id: str) -> None: ...
    def add_hidden(self, request_id: str, row: np.ndarray) -> None: ...

    def add_prompt_hidden(self, request_id: str, start: int, rows: np.ndarray) -> None:
        self.prompt_rows.append((request_id, start, len(rows)))

    def stats(self) -> m.NodeStats:
        return m.NodeStats(num_running=len(self.requests))


class ScriptedFetch:
    is_cancelled = False

    def grant(self, first_block: int, block_ids: Sequence[int]) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True


class ScriptedCompiler:
    """Waits at `gate`; refuses the text `bad`, breaks at `odd`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, wanted: StructuredOutput) -> Any:
        assert self.gate.wait(10)
        if wanted.text == "bad":
            raise InvalidRequestError(f"{wanted.field}: unclosed group", param=wanted.field)
        if wanted.text == "odd":
            raise RuntimeError("a secret")
        return wanted.text


class Scene:
    def __init__(self, max_requests: int = 8, compile_seconds: float = 5.0) -> None:
        self.engine = ScriptedEngine()
        self.compiler = ScriptedCompiler()
        self.sent: list[m.NodeMessage] = []
        self.fetches: list[tuple[ScriptedFetch, FetchListener]] = []
        self.node = DecodeNode(
            engine=self.engine,
            open_fetch=self._open_fetch,
            send=self._send,
            hello=self._hello,
            limits=DecodeLimits(1000, 50, frozenset({2}), max_requests),
            block_size=16,
            hidden_size=8,
            metrics=DecodeMetrics(Metrics("tiny")),
            grammars=Grammars(self.compiler, deadline_seconds=compile_seconds),
            clock=ManualClock(),
        )

    def _send(self, proxy_id: str, message: m.NodeMessage) -> int:
        assert proxy_id == PROXY
        self.sent.append(message)
        return len(self.sent)

    def _hello(self, stats: m.NodeStats, live: list[m.LiveRequest]) -> m.Hello:
        return m.Hello(
            protocol_version=1,
            role="decode",
            model="tiny",
            layout=LAYOUT,
            max_model_len=1000,
            vocab_size=50,
            max_num_seqs=8,
            fetch_endpoints=[],
            stats=stats,
            live_requests=live,
        )

    def _open_fetch(self, source: m.Source, request: FetchRequest, listener: FetchListener) -> ScriptedFetch:
        fetch = ScriptedFetch()
        self.fetches.append((fetch, listener))
        return fetch

    def decode(self, **fields: Any) -> None:
        message = {"request_id": "r", "leg": 1, "prompt_token_ids": [5, 6, 7], "params": SamplingParams(), **fields}
        self.node.received(PROXY, m.Decode(**message))

    def output(self, token_id: int, finish: FinishReason | None = None, engine_id: str = "r#1") -> None:
        request = self.engine.requests[engine_id]
        request.append_output(token_id)
        index = len(request.output_token_ids) - 1
        self.node.engine_events(
            [OutputEvent(engine_id, request, index, token_id, finish_reason=finish, num_cached_tokens=0)]
        )

    def emitted(self) -> list[m.RequestOutput]:
        return [output for message in self.sent if isinstance(message, m.Outputs) for output in message.outputs]


async def drained() -> None:
    """Everything posted to the event loop so far has run."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()
