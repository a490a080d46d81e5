"""Where every request of a scheduler is: one place for each status, and the sums over them. Decides nothing.

waiting        WAITING, PREEMPTED          running       RUNNING
swapped        SWAPPED                     reservations  WAITING_FOR_KV
lookups        computations that only want what is cached
held           FINISHED, but somebody still reads or writes their blocks
(in no queue)  WAITING_FOR_PROMPT, FORKED: their prompt's or their choices' places count
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.request import Request, RequestStatus
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.request_queue import RequestQueue
from common.scheduling.reservations import Reservations


class Queues:
    """requests: all that have not finished, by id, in no particular order."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.swapped = RequestQueue()
        self.reservations = Reservations()
        self.lookups: list[Request] = []
        self.held: dict[str, Request] = {}

    def first_waiting(self) -> Request | None:
        """Who comes in next: the first of those that are new and those that come back."""
        swapped, waiting = self.swapped.first(), self.waiting.first()
        if swapped is None or (waiting is not None and waiting.precedence < swapped.precedence):
            return waiting
        return swapped

    @property
    def num_seats(self) -> int:
        """Sequences that run or will as soon as their prompt's KV is in."""
        return num_sequences(self.running) + num_sequences(self.reservations.snapshot())

    def wait(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.waiting.add(request)

    def run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.add(request)

    def swap(self, request: Request) -> None:
        request.status = RequestStatus.SWAPPED
        self.swapped.add(request)

    def reserve(self, request: Request) -> None:
        request.status = RequestStatus.WAITING_FOR_KV
        self.reservations.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request that has not finished out of its queue; its status is the caller's to set."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.reservations:
            self.reservations.take(request)
        elif request.wants_cached_only:
            self.lookups.remove(request)
        elif request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)

    def check_integrity(self, cache: KVCacheManager) -> None:
        """AssertionError unless queues, statuses and tables agree."""
        queues: list[tuple[RequestStatus, Callable[[Request], bool]]] = [
            (RequestStatus.RUNNING, self.running.__contains__),
            (RequestStatus.WAITING_FOR_KV, self.reservations.__contains__),
            (RequestStatus.SWAPPED, self.swapped.__contains__),
        ]
        for request in self.requests.values():
            for status, is_queued in queues:
                assert (request.status is status) == is_queued(request), f"{request} is in the wrong queue"
            has_blocks = cache.has_table(request.request_id)
            assert has_blocks == (request in self.running or request in self.reservations), f"{request}: blocks?"
            is_swapped = request.request_id in cache.swap_space
            assert is_swapped == (request.status is RequestStatus.SWAPPED), f"{request}: host blocks?"
            _check_family(request)


def _check_family(request: Request) -> None:
    has_forked = request.status is RequestStatus.FORKED
    for choice in request.choices:
        assert choice.parent is request, f"{choice} is not a choice of {request}"
        assert has_forked != (choice.status is RequestStatus.WAITING_FOR_PROMPT), f"{choice} of {request}"
    assert request.choices or not has_forked, f"{request} has no choice left"
    assert request.parent is None or request in request.parent.choices, f"{request} is a stranger to its prompt"


def num_sequences(requests: Iterable[Request]) -> int:
    return sum(request.num_sequences for request in requests)
