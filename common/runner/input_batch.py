"""Turns what the scheduler decided into the flat batch that a model computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.layers.batch import FlatBatch
from common.scheduling.output import ScheduledRequest
from kernels.plan import AttentionShape, Scratch, make_plan

NULL_BLOCK = 0


def make_flat_batch(scheduled: Sequence[ScheduledRequest], shape: AttentionShape, scratch: Scratch) -> FlatBatch:
    num_rows = sum(rows.num_tokens for rows in scheduled)
    token_ids, positions = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    blocks = np.empty(num_rows, np.int64)
    first = 0
    for rows in scheduled:
        end, stop = first + rows.num_tokens, rows.start + rows.num_tokens
        token_ids[first:end] = rows.request.all_token_ids[rows.start : stop]
        positions[first:end] = np.arange(rows.start, stop)
        if rows.recompute_only:
            blocks[first:end] = NULL_BLOCK
        else:
            first_block = rows.start // shape.block_size
            table = np.asarray(rows.block_table[first_block : (stop - 1) // shape.block_size + 1])
            blocks[first:end] = table[positions[first:end] // shape.block_size - first_block]
        first = end
    return FlatBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        plan=make_plan(
            shape,
            [rows.num_tokens for rows in scheduled],
            [rows.start + rows.num_tokens for rows in scheduled],
            [rows.block_table for rows in scheduled],
            blocks,
            positions % shape.block_size,
            scratch,
        ),
    )
