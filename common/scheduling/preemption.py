"""Who gives up blocks when a running request needs one and none is free. Decides; the scheduler carries it out.

    1. reservations, the youngest first: their blocks come back after a fence, so the request skips steps meanwhile
    2. running requests behind it, the youngest first: their blocks come back at once, and they are computed again
    3. nobody: it skips steps until one before it ends, or a served computation is released

Nobody gives up blocks for a request that is only waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.request import Request
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.request_queue import RequestQueue, precedence
from common.scheduling.reservations import Reservations
from common.scheduling.step_plan import StepPlan


def count_on_promised(
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
        if precedence(candidate) <= precedence(request):
            return None
        if not candidate.is_compute_only:
            return candidate
    return None
