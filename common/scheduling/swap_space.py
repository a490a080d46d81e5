"""Host blocks for the KV of preempted requests: which are free, and whose content lies in which.

Knows block ids, no tensor. Host blocks are never shared and never found by hash: they are one request's until it comes
back or ends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class SwappedTable:
    """What a swapped request had: the KV of its first `num_filled_tokens` tokens, in these host blocks, in order.

    is_cacheable: False for KV from before the prefix cache was emptied.
    """

    host_block_ids: tuple[int, ...]
    num_filled_tokens: int
    is_cacheable: bool


class SwapSpace:
    """Not thread-safe: it belongs to one scheduler."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: memory used last is warm
        self._tables: dict[str, SwappedTable] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def table(self, request_id: str) -> SwappedTable:
        return self._tables[request_id]

    def store(
        self, request_id: str, num_blocks: int, num_filled_tokens: int, *, is_cacheable: bool
    ) -> SwappedTable | None:
        """Host blocks for a request, or None when too few are free."""
        assert request_id not in self._tables, f"{request_id} is swapped out twice"
        if num_blocks > len(self._free):
            return None
        host_block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        table = self._tables[request_id] = SwappedTable(host_block_ids, num_filled_tokens, is_cacheable)
        return table

    def keep_from_cache(self) -> None:
        """Nothing that lies here now will be offered to the prefix cache."""
        for table in self._tables.values():
            table.is_cacheable = False

    def free(self, request_id: str) -> None:
        """The content is not wanted any more; nothing happens when there is none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._free.extend(reversed(table.host_block_ids))

    def check_integrity(self) -> None:
        """AssertionError unless every host block is either free or one request's."""
        used = [block_id for table in self._tables.values() for block_id in table.host_block_ids]
        assert sorted(used + self._free) == list(range(self.num_blocks)), "host blocks are lost, or used twice"
