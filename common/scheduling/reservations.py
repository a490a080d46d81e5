"""Requests that wait for another node's KV: their blocks are theirs, but this engine computes nothing into them.

    reserved --revoke--> revoked --take--> (its blocks came back: waits again)
        \\------------------take---------> (blocks are in: runs; or finished: its blocks are held until the fence)

Only the fetching side knows when its last write is done; until it says so, nobody else gets these blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.request import Request
from common.scheduling.request_queue import RequestQueue


class Reservations:
    def __init__(self) -> None:
        self._reserved = RequestQueue()
        self._revoked: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._reserved) + len(self._revoked)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._revoked or request in self._reserved

    def add(self, request: Request) -> None:
        self._reserved.add(request)

    def take(self, request: Request) -> bool:
        """Removes it; True when it had been revoked."""
        if self._revoked.pop(request.request_id, None) is not None:
            return True
        self._reserved.remove(request)
        return False

    def revoke_youngest(self) -> Request | None:
        """The one whose loss a user feels least: without an emitted output first, then the youngest."""
        if not self._reserved:
            return None
        youngest_first = self._reserved.snapshot()[::-1]
        victim = next((r for r in youngest_first if not _has_output(r)), youngest_first[0])
        self._reserved.remove(victim)
        self._revoked[victim.request_id] = victim
        return victim

    def revoked(self) -> Iterator[Request]:
        return iter(self._revoked.values())

    def snapshot(self) -> list[Request]:
        """All of them; may be taken from any thread."""
        return self._reserved.snapshot() + list(self._revoked.values())


def _has_output(request: Request) -> bool:
    return any(sequence.output_token_ids for sequence in request.choices or [request])
