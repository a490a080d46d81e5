"""What one engine step did, in numbers: for metrics and for `--record-steps`. Plain data."""

from __future__ import annotations

import msgspec

from common.messages import Count, Seconds


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One executed step. Counts of requests and blocks are those at the step's end.

    time: seconds from the engine's start to the step's start.
    schedule_seconds, execute_seconds, update_seconds: its three beats; swap_seconds is a part of execute_seconds.
    num_decode_tokens: rows of requests that have outputs and lacked one token only; num_prefill_tokens: all others.
    num_hidden_rows: outputs sampled from hidden states that came from elsewhere.
    num_cached_blocks: free blocks that the prefix cache can still find.
    num_unused_slots: slots of allocated blocks that hold no KV.
    num_preempted: those by swap included. num_swapped_out, num_swapped_in, num_copied: blocks.
    """

    step: Count
    time: Seconds
    schedule_seconds: Seconds
    execute_seconds: Seconds
    update_seconds: Seconds
    swap_seconds: Seconds
    token_budget: Count
    num_scheduled_requests: Count
    num_decode_tokens: Count
    num_prefill_tokens: Count
    num_hidden_rows: Count
    num_outputs: Count
    num_running: Count
    num_waiting: Count
    num_waiting_for_kv: Count
    num_swapped: Count
    num_blocks: Count
    num_used_blocks: Count
    num_cached_blocks: Count
    num_unused_slots: Count
    num_preempted: Count
    num_swap_preempted: Count
    num_swapped_out: Count
    num_swapped_in: Count
    num_copied: Count
    is_cancelled: bool = False
