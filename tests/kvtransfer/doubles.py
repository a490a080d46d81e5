"""Stand-ins for the owners of a fetch: a store whose blocks are made from their tokens, a listener that records."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from common.kv_layout import KVLayout
from kvtransfer.store import FetchKey, FetchRequest, StoreEvents

TINY_LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype="float32", model_fingerprint="tiny"
)
SCRIBBLE = 0xEE


def block_content(tokens: Sequence[int], block: int, layout: KVLayout) -> bytes:
    """What block `block` of these tokens must hold, as far as this store is concerned."""
    own = tokens[: (block + 1) * layout.block_size]
    digest = hashlib.sha256(array("I", own).tobytes()).digest()
    return (digest * (layout.block_bytes // len(digest) + 1))[: layout.block_bytes]


def hidden_rows(tokens: Sequence[int]) -> bytes:
    return b"hidden" + hashlib.sha256(array("I", tokens).tobytes()).digest()


class _OpenFetch:
    def __init__(self, request: FetchRequest, events: StoreEvents) -> None:
        self.request = request
        self.events = events
        self.block_ids: list[int] = []


class ScriptedStore:
    """Computes at once with `is_automatic`; otherwise a test calls `fill`, `hidden` and `computed` itself.

    A released block is scribbled over, so that serving it afterwards cannot go unnoticed.
    """

    def __init__(self, layout: KVLayout = TINY_LAYOUT, num_blocks: int = 256, *, is_automatic: bool = True) -> None:
        self.layout = layout
        self.is_automatic = is_automatic
        self.pool = bytearray([SCRIBBLE]) * (num_blocks * layout.block_bytes)
        self.memory = memoryview(self.pool).toreadonly()
        self.fetches: dict[FetchKey, _OpenFetch] = {}
        self.num_opened = 0
        self.releases: Counter[FetchKey] = Counter()
        self.changed = threading.Condition()
        self._free = list(range(num_blocks))

    def open(self, key: FetchKey, request: FetchRequest, events: StoreEvents) -> None:
        with self.changed:
            assert key not in self.fetches
            self.fetches[key] = _OpenFetch(request, events)
            self.num_opened += 1
            self.changed.notify_all()
        if self.is_automatic:
            events.accepted(0)
            self.fill(key, layout_blocks(self.layout, request))
            self.finish(key)

    def fill(self, key: FetchKey, num_blocks: int) -> None:
        with self.changed:
            fetch = self.fetches[key]
            first = len(fetch.block_ids)
            new_ids = [self._free.pop() for _ in range(num_blocks)]
            fetch.block_ids += new_ids
            for block, block_id in enumerate(new_ids, first):
                self._write(block_id, block_content(fetch.request.tokens, block, self.layout))
        fetch.events.progress(min((first + num_blocks) * self.layout.block_size, len(fetch.request.tokens)))
        fetch.events.filled(first, new_ids)

    def finish(self, key: FetchKey) -> None:
        fetch = self.fetches[key]
        if fetch.request.hidden != "none":
            fetch.events.hidden(hidden_rows(fetch.request.tokens))
        fetch.events.computed()

    def release(self, key: FetchKey) -> None:
        with self.changed:
            self.releases[key] += 1
            for block_id in self.fetches.pop(key).block_ids:
                self._write(block_id, bytes([SCRIBBLE]) * self.layout.block_bytes)
                self._free.append(block_id)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "the store did not get there in time"

    def wait_open(self, num_fetches: int = 1) -> list[FetchKey]:
        self.wait_for(lambda: len(self.fetches) == num_fetches)
        return list(self.fetches)

    def assert_all_released(self) -> None:
        assert not self.fetches
        assert self.num_opened == len(self.releases)
        assert set(self.releases.values()) <= {1}

    def _write(self, block_id: int, content: bytes) -> None:
        self.pool[block_id * self.layout.block_bytes : (block_id + 1) * self.layout.block_bytes] = content


def layout_blocks(layout: KVLayout, request: FetchRequest) -> int:
    return layout.num_blocks_for(len(request.tokens))


class RecordingListener:
    """Keeps what it was told, in order; fails on anything after `ended`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []
        self.num_complete_blocks = -1
        self.error: str | None = None
        self._is_ended = False
        self._changed = threading.Condition()

    def accepted(self, num_cached_tokens: int) -> None:
        self._note("accepted", num_cached_tokens)

    def progress(self, num_computed_tokens: int) -> None:
        self._note("progress", num_computed_tokens)

    def hidden(self, rows: bytes) -> None:
        self._note("hidden", rows)

    def ended(self, *, num_complete_blocks: int, error: str | None) -> None:
        self.num_complete_blocks, self.error = num_complete_blocks, error
        self._note("ended", error)

    def _note(self, what: str, value: object) -> None:
        with self._changed:
            assert not self._is_ended, f"{what} after ended"
            self._is_ended = what == "ended"
            self.told.append((what, value))
            self._changed.notify_all()

    def names(self) -> list[str]:
        return [name for name, _ in self.told]

    def wait_for(self, name: str, seconds: float = 20.0) -> object:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.names(), seconds), f"not told {name}: {self.told}"
            return dict(self.told)[name]

    def wait_ended(self, seconds: float = 20.0) -> str | None:
        self.wait_for("ended", seconds)
        return self.error
