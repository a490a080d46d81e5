"""Who may use which KV block: reference counts, the free list and the prefix cache's hash map.

Knows block ids and hashes only: no tensor, no request, no token. Block 0 is the null block: writes that nobody wants
go there, and it is never allocated. A block is free when nobody refers to it; a free block that still has a hash is
reusable, and is evicted only when no never-hashed block is left, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.block_hash import BlockHash
from common.errors import ConfigError

NULL_BLOCK = 0


class BlockPool:
    """num_blocks counts the null block too; `num_usable` does not. Not thread-safe: it belongs to one scheduler."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"the KV pool has {num_blocks} blocks, must have at least 2 (block 0 is never allocated)")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        self._free_plain = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: memory used last is warm
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evicting cached ones where needed."""
        return len(self._free_plain) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_free_cached(self) -> int:
        """Free blocks that the prefix cache can still find."""
        return len(self._free_cached)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find, in use or not."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def find(self, block_hash: BlockHash) -> int | None:
        return self._cached.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with a reference count of 1 and no hash. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        block_ids = [self._take_free() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def pin(self, block_ids: Sequence[int]) -> None:
        """One more reference to each; a free cached block leaves the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less to each. `block_ids` come in table order, so that of the blocks that become free together
        the tail of the chain is evicted first: without its head a tail could not be found any more."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was freed more often than it was used"
            if count == 0:
                self._put_free(block_id)

    def register(self, block_id: int, block_hash: BlockHash) -> bool:
        """A filled block becomes visible to `find`. False when another block already is known by this hash."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered but nobody uses it"
        if block_hash in self._cached or self._hashes[block_id] is not None:
            return False
        self._cached[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks in use stay in use but are not found again."""
        for block_id in self._cached.values():
            self._hashes[block_id] = None
        self._cached.clear()
        self._free_plain.extend(self._free_cached)
        self._free_cached.clear()

    def num_references(self) -> int:
        return sum(self._ref_counts)

    def check_integrity(self, expected_counts: dict[int, int]) -> None:
        """AssertionError unless every block is either free or used as often as `expected_counts` says, and the hash
        map agrees in both directions. O(num_blocks)."""
        free = {*self._free_plain, *self._free_cached}
        assert len(free) == self.num_free, "a block is on the free list twice"
        assert NULL_BLOCK not in free, "the null block is on the free list"
        for block_id, count in enumerate(self._ref_counts):
            expected = expected_counts.get(block_id, 0)
            assert count == expected, f"block {block_id} has {count} references, {expected} users"
            assert (count == 0) == (block_id in free or block_id == NULL_BLOCK), f"block {block_id}: free or used?"
            assert (block_id in self._free_cached) == (count == 0 and self._hashes[block_id] is not None)
        assert free.isdisjoint(expected_counts), "a used block is on the free list"
        hashed = {h: b for b, h in enumerate(self._hashes) if h is not None}
        assert hashed == self._cached, "the hash map and the blocks' hashes differ"
        assert NULL_BLOCK not in self._cached.values(), "the null block is in the prefix cache"

    def _take_free(self) -> int:
        if self._free_plain:
            return self._free_plain.pop()
        block_id, _ = self._free_cached.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._cached[block_hash]
        self._hashes[block_id] = None
        return block_id

    def _put_free(self, block_id: int) -> None:
        if self._hashes[block_id] is None:
            self._free_plain.append(block_id)
        else:
            self._free_cached[block_id] = None
