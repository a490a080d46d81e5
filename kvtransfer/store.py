"""What kvtransfer asks of a node that serves KV blocks, and what it tells a node that fetches them.

Both directions are narrow: kvtransfer knows bytes, block ids and tokens; it knows no engine and no tensor.

Serving (a fetch as the store sees it):

    store.open(key, request, events)      the client's FETCH was valid; the store starts to look up and compute
    events.accepted(num_cached_tokens)    what the store's own prefix cache had
    events.filled(first, block_ids)       blocks first, first+1, ... of the tokens are filled in these pool blocks and
                                          stay pinned until `release`; called as chunks finish, in order
    events.progress(num_computed_tokens)  for keep-alives
    events.hidden(rows)                   hidden states, float32 bytes
    events.computed()                     nothing more will come
    events.failed(code, message)          instead of the above
    store.release(key)                    exactly once for every opened fetch, however it ended (also when `open`
                                          raised): unpin everything, stop computing. After it `events` is ignored.

`events` may be called from any thread. `open` and `release` are called from the server's thread and must not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from common.kv_layout import KVLayout

HiddenMode = Literal["none", "last", "all"]
FetchKey = tuple[str, int]  # (client instance id, number): never reused


@dataclass(frozen=True)
class FetchRequest:
    """What a client wants: KV of `tokens` (blocks, the last one may be partial) and hidden states.

    units: False when only hidden states are wanted. compute: False serves only what is cached.
    queue_seconds: how long the server may leave it queued before the first token is computed.
    """

    tokens: Sequence[int]
    cache_salt: str = ""
    hidden: HiddenMode = "last"
    units: bool = True
    compute: bool = True
    priority: int = 0
    queue_seconds: float = 60.0


class StoreEvents(Protocol):
    def accepted(self, num_cached_tokens: int) -> None: ...
    def filled(self, first_block: int, block_ids: Sequence[int]) -> None: ...
    def progress(self, num_computed_tokens: int) -> None: ...
    def hidden(self, rows: bytes) -> None: ...
    def computed(self) -> None: ...
    def failed(self, code: str, message: str) -> None: ...


class BlockStore(Protocol):
    """A node's pool and engine, as the fetch server sees them.

    memory: the whole pool, read-only bytes; block b is memory[b * layout.block_bytes : (b + 1) * layout.block_bytes].
    """

    layout: KVLayout
    memory: memoryview

    def open(self, key: FetchKey, request: FetchRequest, events: StoreEvents) -> None: ...
    def release(self, key: FetchKey) -> None: ...


class FetchListener(Protocol):
    """Told of one fetch's progress, from the client's receiver thread.

    `ended` comes exactly once for every fetch, last, and after the fence: from then on nothing writes into the blocks
    that were granted to it.
    """

    def accepted(self, num_cached_tokens: int) -> None: ...
    def progress(self, num_computed_tokens: int) -> None: ...
    def hidden(self, rows: bytes) -> None: ...

    def ended(self, *, num_complete_blocks: int, error: str | None) -> None:
        """num_complete_blocks: leading blocks (counted from block 0, those before the first wanted one included) with
        all layers in and verified. error: None when all came; otherwise why not ("cancelled" after a cancel)."""
        ...


class FetchHandle(Protocol):
    def grant(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks are reserved: unit data of token blocks first_block, first_block + 1, ... may be written into these
        pool blocks. Credit starts to flow; before this the server sends hidden states only."""
        ...

    def cancel(self) -> None:
        """Ends the fetch; `listener.ended` follows."""
        ...
