"""Who gives up blocks when a running request needs one and none is free, and how. The scheduler carries it out.

    1. reservations, the youngest first: their blocks come back after a fence, so the request skips steps meanwhile
    2. running requests behind it, the youngest first: their blocks come back at once. What was in them is computed
       again (recompute) or copied to the host and back (swap), whichever costs less
    3. nobody: it skips steps until one before it ends, or a served computation is released

Nobody gives up blocks for a request that is only waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.request import Request
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.request_queue import RequestQueue
from common.scheduling.reservations import Reservations
from common.scheduling.step_plan import StepPlan


def revoke_until_promised(
    shortage: int, plan: StepPlan, cache: KVCacheManager, reservations: Reservations, held: Mapping[str, Request]
) -> bool:
    """Whether reservations will give back `shortage` blocks, revoking more of them as needed.

    held: finished requests; those that were fetching give back their blocks after the fence, too.
    """
    if plan.num_promised_blocks is None:
        owners = [*reservations.revoked(), *(request for request in held.values() if not request.is_compute_only)]
        plan.num_promised_blocks = sum(cache.num_exclusive_blocks(owner.request_id) for owner in owners)
    while plan.num_promised_blocks < shortage:
        victim = reservations.revoke_youngest()
        if victim is None:
            return False
        plan.revoked.append(victim)
        plan.num_promised_blocks += cache.num_exclusive_blocks(victim.request_id)
    plan.num_promised_blocks -= shortage
    return True


def youngest_behind(request: Request, running: RequestQueue) -> Request | None:
    """The running request to preempt for this one.

    A computation is no victim: what it filled may be on its way to another node, and it needs no more blocks.
    """
    for candidate in reversed(running.snapshot()):
        if candidate.precedence <= request.precedence:
            return None
        if not candidate.is_compute_only:
            return candidate
    return None


class MarginalCost:
    """Seconds that one more item costs, from measurements of (items, seconds); old ones count less and less.

    The slope of a straight line through them. While they are all of one size, or too noisy for more to take longer,
    their mean: an overestimate, since it counts what every piece of work costs however small it is.
    """

    _DECAY = 0.99
    _FADING = 0.9

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._count > 0

    @property
    def seconds_per_item(self) -> float:
        covariance = self._count * self._xy - self._x * self._y
        variance = self._count * self._xx - self._x**2
        if covariance > 0 and variance > 1e-6 * self._count * self._xx:
            return covariance / variance
        return self._y / self._x

    def observe(self, num_items: int, seconds: float) -> None:
        self._count = self._count * self._DECAY + 1
        self._x = self._x * self._DECAY + num_items
        self._y = self._y * self._DECAY + seconds
        self._xx = self._xx * self._DECAY + num_items * num_items
        self._xy = self._xy * self._DECAY + num_items * seconds

    def fade(self) -> None:
        """It was found too dear and not measured again: believed a little less, so that it is tried again some day."""
        self._y *= self._FADING
        self._xy *= self._FADING


class PreemptionCosts:
    """What the engine measured: of computing, by rows; of copying between pool and host, by blocks."""

    def __init__(self) -> None:
        self.compute = MarginalCost()
        self.swap = MarginalCost()

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to copy `num_blocks` out and in again rather than to compute `num_tokens` again, in the steps of
        the streams that go on. What was never measured is tried."""
        if not (self.swap.is_known and self.compute.is_known):
            return True
        return 2 * num_blocks * self.swap.seconds_per_item < num_tokens * self.compute.seconds_per_item
