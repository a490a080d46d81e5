"""The engine of a prefill node as a content-addressed KV store: looks up, computes what it lacks, pins what it serves.

A fetch becomes a computation of the engine under its key; the engine's events become the fetch's. It knows token
sequences, not requests; no sampler, no vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from common.engine.events import BlocksFilledEvent, ComputedEvent, ComputeStartedEvent, Event, FailedEvent, HiddenEvent
from common.errors import TandemError
from common.kv_layout import KVLayout
from common.logging import log_event
from common.request import Request
from kvtransfer.store import FetchKey, FetchRequest, StoreEvents

log = logging.getLogger(__name__)


class EngineSide(Protocol):
    """The engine's commands that a store uses (see AsyncEngine)."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...


class EngineStore:
    """A `BlockStore` over an engine; `open` and `release` come from the fetch server's thread, events from its own."""

    def __init__(self, engine: EngineSide, layout: KVLayout, memory: memoryview, vocab_size: int) -> None:
        self.layout = layout
        self.memory = memory
        self._engine = engine
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._open: dict[str, StoreEvents] = {}
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, key: FetchKey, request: FetchRequest, events: StoreEvents) -> None:
        if refusal := self._refusal(request):
            events.failed(*refusal)
            return
        request_id = _request_id(key)
        with self._lock:
            self._open[request_id] = events
        computation = Request(
            request_id=request_id,
            prompt_token_ids=list(request.tokens),
            cache_salt=request.cache_salt,
            priority=request.priority,
            want_all_hidden=request.hidden == "all",
            wants_cached_only=not request.compute,
        )
        try:
            self._engine.add(computation)
        except TandemError as error:
            self.release(key)
            events.failed(error.code, error.message)

    def release(self, key: FetchKey) -> None:
        request_id = _request_id(key)
        with self._lock:
            was_open = self._open.pop(request_id, None) is not None
        if was_open:
            self._engine.release(request_id)

    def engine_events(self, events: Sequence[Event]) -> None:
        """All events of one engine step."""
        for event in events:
            with self._lock:
                sink = self._open.get(event.request_id)
            if sink is not None:
                _forward(event, sink)
                if isinstance(event, BlocksFilledEvent):
                    log_event(
                        log,
                        "chunk_computed",
                        level=logging.DEBUG,
                        request_id=event.request_id,
                        tokens=event.num_computed_tokens,
                    )

    def _refusal(self, request: FetchRequest) -> tuple[str, str] | None:
        if self.is_draining:
            return "draining", "this node is draining"
        if (worst := max(request.tokens)) >= self._vocab_size:
            return "invalid_value", f"token id {worst} is out of range, the vocabulary has {self._vocab_size} tokens"
        return None


def _request_id(key: FetchKey) -> str:
    return f"{key[0]}/{key[1]}"


def _forward(event: Event, sink: StoreEvents) -> None:
    if isinstance(event, ComputeStartedEvent):
        sink.accepted(event.num_cached_tokens)
    elif isinstance(event, BlocksFilledEvent):
        sink.progress(event.num_computed_tokens)
        if event.block_ids:
            sink.filled(event.first_block, event.block_ids)
    elif isinstance(event, HiddenEvent):
        sink.hidden(event.rows.tobytes())
    elif isinstance(event, ComputedEvent):
        sink.computed()
    elif isinstance(event, FailedEvent):
        sink.failed("compute_failed", event.error)
