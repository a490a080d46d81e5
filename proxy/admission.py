"""Lets requests onto nodes: at once when there is room, otherwise after a wait that has bounds.

    place -> a route, and seats for its sequences on its decode node, which `release` gives back
          -> no room: queue (by priority, then arrival) -> room in time: a route
                                                        -> too late, or the queue is full: 429
          -> no decode node at all, and none comes in time: 503

Who waits is woken by `pump`, which whoever changes the pool calls.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field

from common.errors import OverloadedError, UnavailableError
from proxy.node_pool import NodePool
from proxy.routing import Need, Route, choose_route


@dataclass(frozen=True)
class AdmissionLimits:
    """max_queue: requests that may wait. queue_seconds: how long for room. node_wait_seconds: how long for a node."""

    max_queue: int = 1024
    queue_seconds: float = 60.0
    node_wait_seconds: float = 10.0
    min_split_tokens: int = 16


@dataclass(order=True)
class _Waiter:
    rank: tuple[int, int]
    need: Need = field(compare=False)
    route: asyncio.Future[Route] = field(compare=False)
    patience: asyncio.Timeout = field(compare=False)
    queue_deadline: float = field(compare=False)


class Admission:
    """Belongs to one event loop."""

    def __init__(self, pool: NodePool, limits: AdmissionLimits | None = None) -> None:
        self._pool = pool
        self._limits = limits or AdmissionLimits()
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._had_nodes = pool.is_ready

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def place(self, need: Need, *, priority: int = 0) -> Route:
        """A route whose place is taken; raises OverloadedError or UnavailableError. Lower priorities go first."""
        if not self._waiters and (route := self._try(need)) is not None:
            return route
        if len(self._waiters) >= self._limits.max_queue:
            raise OverloadedError(
                f"{len(self._waiters)} requests are waiting, at most {self._limits.max_queue} may",
                retry_after_seconds=self._retry_after(),
            )
        self._set_deadlines()
        loop = asyncio.get_running_loop()
        queue_deadline = loop.time() + self._limits.queue_seconds
        patience = asyncio.timeout_at(self._deadline(queue_deadline))
        rank = (priority, next(self._arrivals))
        waiter = _Waiter(rank, need, loop.create_future(), patience, queue_deadline)
        self._waiters.append(waiter)
        self._waiters.sort()
        self.pump()
        return await self._wait(waiter)

    def release(self, route: Route, num_sequences: int = 1) -> None:
        """So many seats of a placement are free again."""
        route.decode_node.num_own_sequences -= num_sequences
        self.pump()

    def pump(self) -> None:
        """Places those who wait, in order, while there is room. Nobody waits behind one that fits no node there is."""
        self._set_deadlines()
        limit = self._pool.max_num_seqs
        for waiter in list(self._waiters):
            if waiter.route.done():  # given up in this very moment
                continue
            if (route := self._try(waiter.need)) is None:
                if limit is not None and waiter.need.num_sequences > limit:
                    continue
                return
            self._waiters.remove(waiter)
            waiter.route.set_result(route)

    async def _wait(self, waiter: _Waiter) -> Route:
        try:
            async with waiter.patience:
                return await waiter.route
        except TimeoutError:
            if waiter.route.done() and not waiter.route.cancelled():
                return waiter.route.result()
            raise self._too_late() from None
        except asyncio.CancelledError:
            if waiter.route.done() and not waiter.route.cancelled():
                self.release(waiter.route.result(), waiter.need.num_sequences)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _try(self, need: Need) -> Route | None:
        route = choose_route(self._pool, need, min_split_tokens=self._limits.min_split_tokens)
        if route is not None:
            self._take(route, need)
        return route

    def _take(self, route: Route, need: Need) -> None:
        route.decode_node.num_own_sequences += need.num_sequences
        route.decode_node.dispatched_tokens += need.num_tokens
        if route.sources and (source := self._pool.get(route.sources[0].instance_id)) is not None:
            source.dispatched_tokens += need.num_tokens

    def _deadline(self, queue_deadline: float) -> float:
        """Without a node there is less patience, from when there was none."""
        if self._pool.is_ready:
            return queue_deadline
        return min(queue_deadline, asyncio.get_running_loop().time() + self._limits.node_wait_seconds)

    def _set_deadlines(self) -> None:
        """Anew for all when the first node came or the last one left."""
        if self._pool.is_ready is self._had_nodes:
            return
        self._had_nodes = self._pool.is_ready
        for waiter in self._waiters:
            if not waiter.patience.expired():
                waiter.patience.reschedule(self._deadline(waiter.queue_deadline))

    def _too_late(self) -> OverloadedError | UnavailableError:
        if not self._pool.is_ready:
            return UnavailableError(f"no decode node joined within {self._limits.node_wait_seconds:g} s")
        return OverloadedError(
            f"no decode node had room within {self._limits.queue_seconds:g} s", retry_after_seconds=self._retry_after()
        )

    def _retry_after(self) -> float:
        """A rough guess: a second for each time that the nodes would have to empty and fill again."""
        num_places = sum(node.hello.max_num_seqs for node in self._pool.with_role("decode"))
        return min(60.0, 1.0 + math.ceil(len(self._waiters) / max(1, num_places)))
