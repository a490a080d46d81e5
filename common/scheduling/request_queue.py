"""An ordered set of requests: smaller priority numbers first, first come first served within one priority.

The same order rules who waits, who is scheduled first and (from the other end) who gives up blocks first, so that a
preempted or revoked request finds its old place again, ahead of all that came later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from common.request import Request


class RequestQueue:
    """Sorted by precedence, which must be unique. Finding and removing is O(log n) plus a memory move."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._keys, request.precedence)
        return index < len(self._keys) and self._requests[index] is request

    def snapshot(self) -> list[Request]:
        """A copy in order; may be taken from any thread (one C-level copy)."""
        return self._requests[:]

    def add(self, request: Request) -> None:
        key = request.precedence
        index = bisect_left(self._keys, key)
        assert index == len(self._keys) or self._keys[index] != key, f"{request} is queued twice"
        self._keys.insert(index, key)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        assert request in self, f"{request} is not in this queue"
        index = bisect_left(self._keys, request.precedence)
        del self._keys[index]
        del self._requests[index]

    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None
