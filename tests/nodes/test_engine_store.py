"""A prefill node's engine as a store of blocks: real scheduler and engine thread, a runner that computes nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from common.engine.async_engine import AsyncEngine
from common.engine.engine import Engine
from common.kv_layout import KVLayout
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import CancelCheck, Inbox, SchedulerOutput, StepResult
from common.scheduling.scheduler import Scheduler
from kvtransfer.store import FetchRequest
from prefill_node.engine_store import EngineStore

LAYOUT = KVLayout(2, 1, 4, 16, "float32", "tiny")
VOCABULARY = 100
KEY = ("client", 1)


class IdleRunner:
    """Gives a caught-up computation a hidden row of its token count."""

    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult:
        return StepResult(
            hidden={
                rows.request.request_id: np.full((1, 4), rows.start + rows.num_tokens, np.float32)
                for rows in batch.scheduled
                if rows.is_last_chunk
            }
        )


class Recorder:
    """StoreEvents that a test waits for."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def accepted(self, num_cached_tokens: int) -> None:
        self.calls.put(("accepted", num_cached_tokens))

    def filled(self, first_block: int, block_ids: Sequence[int]) -> None:
        self.calls.put(("filled", first_block, len(block_ids)))

    def progress(self, num_computed_tokens: int) -> None:
        self.calls.put(("progress", num_computed_tokens))

    def hidden(self, rows: bytes) -> None:
        self.calls.put(("hidden", np.frombuffer(rows, np.float32)[0]))

    def computed(self) -> None:
        self.calls.put(("computed",))

    def failed(self, code: str, message: str) -> None:
        self.calls.put(("failed", code, message))

    def until(self, name: str) -> list[tuple[Any, ...]]:
        seen = []
        while not seen or seen[-1][0] != name:
            seen.append(self.calls.get(timeout=10))
        return seen


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=64, max_model_len=512), KVCacheManager(LAYOUT, 41))
    engine = AsyncEngine(Engine(scheduler, IdleRunner()), lambda events: stores[-1].engine_events(events))
    stores: list[EngineStore] = []
    engine.stores = stores  # type: ignore[attr-defined]
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def store(engine: AsyncEngine) -> EngineStore:
    store = EngineStore(engine, LAYOUT, memoryview(b""), VOCABULARY)
    engine.stores.append(store)  # type: ignore[attr-defined]
    return store


def fetch(store: EngineStore, num_tokens: int, **fields: Any) -> Recorder:
    recorder = Recorder()
    store.open(KEY, FetchRequest(tokens=[i % VOCABULARY for i in range(num_tokens)], **fields), recorder)
    return recorder


def test_blocks_are_told_chunk_by_chunk_then_the_hidden_row(store: EngineStore) -> None:
    seen = fetch(store, 150).until("computed")
    assert [call for call in seen if call[0] in ("accepted", "filled", "hidden")] == [
        ("accepted", 0),
        ("filled", 0, 4),
        ("filled", 4, 4),
        ("filled", 8, 2),
        ("hidden", 150.0),
    ]


def test_release_gives_all_blocks_back(store: EngineStore, engine: AsyncEngine) -> None:
    fetch(store, 150).until("computed")
    assert engine.stats().num_free_blocks == 30
    store.release(KEY)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == 40
    assert store.num_open == 0


def test_cached_blocks_are_told_at_once(store: EngineStore) -> None:
    fetch(store, 150).until("computed")
    store.release(KEY)
    seen = fetch(store, 150).until("computed")
    assert seen[0] == ("accepted", 144)
    assert ("filled", 0, 9) in seen


def test_compute_false_serves_only_what_is_cached(store: EngineStore) -> None:
    fetch(store, 64).until("computed")
    store.release(KEY)
    seen = fetch(store, 150, compute=False, hidden="none").until("computed")
    assert [call for call in seen if call[0] in ("accepted", "filled")] == [("accepted", 64), ("filled", 0, 4)]


def test_token_out_of_the_vocabulary_is_refused(store: EngineStore) -> None:
    recorder = Recorder()
    store.open(KEY, FetchRequest(tokens=[1, VOCABULARY]), recorder)
    assert recorder.until("failed")[-1][2] == "token id 100 is out of range, the vocabulary has 100 tokens"


def test_what_can_never_fit_is_refused_with_the_numbers(store: EngineStore) -> None:
    message = fetch(store, 600).until("failed")[-1][2]
    assert "600" in message
    assert "512" in message
    assert store.num_open == 0


def test_draining_store_refuses(store: EngineStore) -> None:
    store.is_draining = True
    assert fetch(store, 10).until("failed")[-1][1] == "draining"
