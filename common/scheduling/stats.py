"""What a scheduler says of its load: sums over its queues and its cache. From any thread."""

from __future__ import annotations

from common.messages import NodeStats
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.queues import Queues, num_sequences


def measure(queues: Queues, cache: KVCacheManager, num_preemptions: int, num_swap_preemptions: int) -> NodeStats:
    """Requests count as many as the sequences that they are or will be."""
    running, waiting, held = queues.running.snapshot(), queues.waiting.snapshot(), list(queues.held)
    queued = sum(request.num_tokens for request in waiting if not request.wants_remote_kv)
    return NodeStats(
        num_running=num_sequences(running),
        num_waiting=num_sequences(waiting),
        num_waiting_for_kv=num_sequences(queues.reservations.snapshot()),
        num_swapped=len(queues.swapped),
        num_queued_tokens=queued + sum(request.num_remaining for request in running),
        num_free_blocks=cache.num_free_blocks,
        num_blocks=cache.pool.num_usable,
        num_held_blocks=sum(len(cache.block_ids(request_id)) for request_id in held),
        num_unused_slots=cache.num_unused_slots(),
        num_host_blocks=cache.swap_space.num_blocks,
        num_free_host_blocks=cache.swap_space.num_free,
        prefix_cache_queries=cache.num_queried_tokens,
        prefix_cache_hits=cache.num_hit_tokens,
        num_preemptions=num_preemptions,
        num_swap_preemptions=num_swap_preemptions,
    )
