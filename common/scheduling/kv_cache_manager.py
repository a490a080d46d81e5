"""Which blocks each request has, and which of them the prefix cache may show to others.

Knows block ids, token ids and hashes; no tensor, no step, no policy. "No room" is a returned decision, never an
exception. A block becomes visible to other requests only when `mark_filled` says that its KV is in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.block_hash import extend_chain, root_hash
from common.kv_layout import KVLayout
from common.request import Request
from common.scheduling.block_pool import BlockPool
from common.scheduling.output import Copy
from common.scheduling.swap_space import SwapSpace

Write: TypeAlias = tuple[str, int, int]
"""(request id, start, end): KV of its positions start .. end - 1 will be written."""


@dataclass(eq=False, slots=True)
class BlockTable:
    """Blocks of one request, position 0 first.

    num_filled_tokens: this many leading tokens have their KV in the blocks.
    num_offered: this many leading blocks need not be offered to the prefix cache again.
    is_cacheable: False for blocks from before the prefix cache was emptied.
    """

    block_ids: list[int]
    num_filled_tokens: int
    num_offered: int
    is_cacheable: bool = True


class KVCacheManager:
    """Books the pool of one engine. Not thread-safe: it belongs to one scheduler."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, *, enable_prefix_caching: bool = True, num_host_blocks: int = 0
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.swap_space = SwapSpace(num_host_blocks)
        self.num_resets = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._tables: dict[str, BlockTable] = {}

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Most tokens whose KV the whole pool can hold."""
        return self.pool.num_usable * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    def block_ids(self, request_id: str) -> Sequence[int]:
        """The live table; empty when the request has none."""
        table = self._tables.get(request_id)
        return () if table is None else table.block_ids

    def num_filled_tokens(self, request_id: str) -> int:
        return self._tables[request_id].num_filled_tokens

    def num_kept_tokens(self, request: Request) -> int:
        """Leading tokens of a request without blocks whose KV need not be computed: cached here, or on the host."""
        num_cached = len(self.find_prefix(request)) * self.block_size
        if request.request_id not in self.swap_space:
            return num_cached
        return max(num_cached, self.swap_space.table(request.request_id).num_filled_tokens)

    def num_exclusive_blocks(self, request_id: str) -> int:
        """Blocks that would become free with this request."""
        return sum(1 for block_id in self.block_ids(request_id) if self.pool.ref_count(block_id) == 1)

    def num_unused_slots(self) -> int:
        """Slots of tables' blocks that hold no KV: what paging wastes. From any thread (nearly exact then)."""
        unused: dict[int, int] = {}
        for table in list(self._tables.values()):
            first = table.num_filled_tokens // self.block_size
            for index, block_id in enumerate(table.block_ids[first:], first):
                num_empty = min((index + 1) * self.block_size - table.num_filled_tokens, self.block_size)
                unused[block_id] = min(num_empty, unused.get(block_id, self.block_size))
        return sum(unused.values())

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of all its tokens, whole blocks only."""
        if not self.enable_prefix_caching or request.want_all_hidden or request.is_scoring:
            return []
        found: list[int] = []
        for block_hash in self._extend_hashes(request):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_missing_blocks(self, writes: Iterable[Write]) -> int:
        """Blocks to allocate before all of this can be written. The last owner of a shared block needs no copy."""
        num_missing = 0
        writers: Counter[int] = Counter()
        for request_id, start, end in writes:
            table = self._tables[request_id]
            num_missing += self._num_growth(table, end)
            writers.update(table.block_ids[index] for index in self._shared_indices(table, start, end))
        return num_missing + sum(min(n, self.pool.ref_count(block_id) - 1) for block_id, n in writers.items())

    # --- allocation -------------------------------------------------------------------------------------------------

    def admit(self, request: Request, num_tokens: int, *, num_spare_blocks: int = 0) -> int | None:
        """Gives a request its table: cached prefix blocks and new ones for `num_tokens` slots, all or nothing.

        Returns the number of cached tokens (whole blocks), or None when there is no room or fewer than
        `num_spare_blocks` would stay free.
        """
        table = self._make_table(request, num_tokens, num_spare_blocks)
        if table is None:
            return None
        self._count(request, table.num_filled_tokens)
        return table.num_filled_tokens

    def admit_cached(self, request: Request) -> int:
        """Gives a request a table of its cached prefix blocks only; returns the number of cached tokens."""
        num_cached = len(self.find_prefix(request)) * self.block_size
        admitted = self.admit(request, num_cached)
        assert admitted == num_cached
        return num_cached

    def prepare_write(self, request_id: str, start: int, end: int) -> tuple[Copy, ...] | None:
        """Makes positions start .. end - 1 writable: appends blocks, and replaces shared ones by copies.

        Returns the copies to make before the write, or None when too few blocks are free (then nothing changed).
        """
        table = self._tables[request_id]
        growth = self._num_growth(table, end)
        shared = self._shared_indices(table, start, end)
        if growth + len(shared) > self.pool.num_free:
            return None
        if growth:
            table.block_ids.extend(self.pool.allocate(growth))
        return tuple(self._copy_on_write(table, index) for index in shared)

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares all blocks of the parent; whoever writes into a shared one first gets a copy."""
        table = self._tables[parent.request_id]
        self.pool.pin(table.block_ids)
        self._tables[child.request_id] = BlockTable(
            list(table.block_ids), table.num_filled_tokens, table.num_offered, table.is_cacheable
        )

    def keep_from_cache(self, request_id: str) -> None:
        """What is and will be in its blocks is not offered to the prefix cache."""
        self._tables[request_id].is_cacheable = False

    def mark_filled(self, request: Request, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens is in: full blocks become visible to the prefix cache."""
        table = self._tables[request.request_id]
        table.num_filled_tokens = max(table.num_filled_tokens, num_tokens)
        num_full = table.num_filled_tokens // self.block_size
        if num_full <= table.num_offered or not (table.is_cacheable and self.enable_prefix_caching):
            return
        hashes = self._extend_hashes(request)
        for index in range(table.num_offered, num_full):
            self.pool.register(table.block_ids[index], hashes[index])
        table.num_offered = num_full

    def free(self, request_id: str) -> None:
        """The request gives up all its blocks, host blocks too; nothing happens when it has none."""
        self.swap_space.free(request_id)
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free(table.block_ids)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is reused, also not what is being computed now (its head would be missing), and what
        another node computes for a request that is here already."""
        self.num_resets += 1
        self.pool.forget_all()
        for table in self._tables.values():
            table.is_cacheable = False
        self.swap_space.keep_from_cache()

    # --- swap -------------------------------------------------------------------------------------------------------

    def swap_out(self, request_id: str) -> tuple[Copy, ...] | None:
        """Moves a request's filled blocks to the host; its table is gone.

        Returns (pool block, host block) pairs, to be copied before anything is written into the pool, or None when
        the host has too little room or there is nothing to keep (then nothing changed).
        """
        table = self._tables[request_id]
        num_blocks = self.layout.num_blocks_for(table.num_filled_tokens)
        if not num_blocks:
            return None
        swapped = self.swap_space.store(
            request_id, num_blocks, table.num_filled_tokens, is_cacheable=table.is_cacheable
        )
        if swapped is None:
            return None
        del self._tables[request_id]
        self.pool.free(table.block_ids)
        return tuple(zip(table.block_ids, swapped.host_block_ids, strict=False))  # the rest holds no KV yet

    def swap_in(self, request: Request, num_tokens: int, *, num_spare_blocks: int = 0) -> tuple[Copy, ...] | None:
        """Gives a swapped request a table again, as `admit` does; what the prefix cache still has is not copied.

        Returns (host block, pool block) pairs, to be copied before the next forward pass, or None when there is no
        room.
        """
        table = self._make_table(request, num_tokens, num_spare_blocks)
        if table is None:
            return None
        swapped = self.swap_space.table(request.request_id)
        first = table.num_offered
        copies = tuple(zip(swapped.host_block_ids[first:], table.block_ids[first:], strict=False))
        table.num_filled_tokens = max(table.num_filled_tokens, swapped.num_filled_tokens)
        table.is_cacheable = swapped.is_cacheable
        self.swap_space.free(request.request_id)
        return copies

    # --- our own invariants -----------------------------------------------------------------------------------------

    def check_counts(self) -> None:
        """The cheap part of `check_integrity`: the sums agree."""
        num_held = sum(len(table.block_ids) for table in self._tables.values())
        assert self.pool.num_references() == num_held, f"{self.pool.num_references()} references, {num_held} in tables"

    def check_integrity(self) -> None:
        """AssertionError unless free + used = total, counts = tables and the hash map is consistent."""
        counts: Counter[int] = Counter()
        for table in self._tables.values():
            assert len(set(table.block_ids)) == len(table.block_ids), "a table has a block twice"
            counts.update(table.block_ids)
        self.pool.check_integrity(counts)
        self.swap_space.check_integrity()
        assert not any(request_id in self.swap_space for request_id in self._tables), "swapped out and in at once"
        assert self.pool.num_free + len(counts) == self.pool.num_usable, "free + used is not the total"

    # --- parts ------------------------------------------------------------------------------------------------------

    def _make_table(self, request: Request, num_tokens: int, num_spare_blocks: int) -> BlockTable | None:
        """Cached prefix blocks and new ones for `num_tokens` slots, all or nothing."""
        assert request.request_id not in self._tables, f"{request} already has blocks"
        hits = self.find_prefix(request)
        num_new = max(self.layout.num_blocks_for(num_tokens) - len(hits), 0)
        num_revived = sum(1 for block_id in hits if self.pool.ref_count(block_id) == 0)
        if num_new + num_revived + num_spare_blocks > self.pool.num_free:
            return None
        self.pool.pin(hits)  # before allocating, which might evict them
        num_cached = len(hits) * self.block_size
        table = BlockTable(hits + self.pool.allocate(num_new), num_cached, len(hits))
        self._tables[request.request_id] = table
        return table

    def _num_growth(self, table: BlockTable, end: int) -> int:
        return max(self.layout.num_blocks_for(end) - len(table.block_ids), 0)

    def _shared_indices(self, table: BlockTable, start: int, end: int) -> list[int]:
        last = min(self.layout.num_blocks_for(end), len(table.block_ids))
        block_ids, pool = table.block_ids, self.pool
        return [i for i in range(start // self.block_size, last) if pool.ref_count(block_ids[i]) > 1]

    def _copy_on_write(self, table: BlockTable, index: int) -> Copy:
        source = table.block_ids[index]
        [destination] = self.pool.allocate(1)
        self.pool.free([source])  # stays used by the others, so its content outlives the copy
        table.block_ids[index] = destination
        return source, destination

    def _extend_hashes(self, request: Request) -> list[bytes]:
        chain = request.block_hashes
        root = b"" if chain else root_hash(self.layout, cache_salt=request.cache_salt, adapter=request.adapter)
        return extend_chain(chain, root, request.all_token_ids, self.block_size)

    def _count(self, request: Request, num_cached: int) -> None:
        """Hit rate counts each request once, when it is first admitted."""
        if request.num_cached_tokens is None and self.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached
