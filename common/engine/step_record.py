"""What one engine step did, in numbers: for metrics and for `--record-steps`. Plain data."""

from __future__ import annotations

import msgspec


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

    step: int
    time: float
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float
    swap_seconds: float
    token_budget: int
    num_scheduled_requests: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_hidden_rows: int
    num_outputs: int
    num_running: int
    num_waiting: int
    num_waiting_for_kv: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_unused_slots: int
    num_preempted: int
    num_swap_preempted: int
    num_swapped_out: int
    num_swapped_in: int
    num_copied: int
    is_cancelled: bool = False
