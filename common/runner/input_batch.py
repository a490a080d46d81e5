"""Turns what the scheduler decided into the flat batch that a model computes.

Row i is token i of the step, whichever request it is of: no padding, no order by kind. Python touches each request
once (a slice of its tokens, a slice of its block table); what is per row is done by numpy in buffers that stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.layers.batch import FlatBatch
from common.scheduling.output import ScheduledRequest
from kernels.plan import AttentionShape, make_plan


class InputBatch:
    """Reused for every step: a batch is good until the next one is made."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._capacity = 0
        self._reserve(64)

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = max(num_rows, 2 * self._capacity)
        self._token_ids = torch.empty(self._capacity, dtype=torch.int64)
        self._positions = torch.empty(self._capacity, dtype=torch.int64)
        self._rows = np.arange(self._capacity)
        self._blocks = np.empty(self._capacity, np.int64)
        self._slots = np.empty(self._capacity, np.int64)

    def make(self, scheduled: Sequence[ScheduledRequest]) -> FlatBatch:
        num_rows = sum(rows.num_tokens for rows in scheduled)
        self._reserve(num_rows)
        self._fill_tokens(scheduled, num_rows)
        self._fill_slots(scheduled, num_rows)
        plan = make_plan(
            self._shape,
            [rows.num_tokens for rows in scheduled],
            [rows.start + rows.num_tokens for rows in scheduled],
            [rows.block_table for rows in scheduled],
            self._blocks[:num_rows],
            self._slots[:num_rows],
        )
        return FlatBatch(token_ids=self._token_ids[:num_rows], positions=self._positions[:num_rows], plan=plan)

    def _fill_tokens(self, scheduled: Sequence[ScheduledRequest], num_rows: int) -> None:
        token_ids: list[int] = []
        for rows in scheduled:
            token_ids += rows.request.all_token_ids[rows.start : rows.start + rows.num_tokens]
        self._token_ids.numpy()[:num_rows] = token_ids
        counts = [rows.num_tokens for rows in scheduled]
        first_rows = np.cumsum([0, *counts[:-1]])
        ahead = np.array([rows.start for rows in scheduled]) - first_rows  # position of a row, less its row number
        np.add(self._rows[:num_rows], np.repeat(ahead, counts), out=self._positions.numpy()[:num_rows])

    def _fill_slots(self, scheduled: Sequence[ScheduledRequest], num_rows: int) -> None:
        """Block, and slot in it, that each row's K and V go to; block 0, the null block, for rows that only read."""
        block_size = self._shape.block_size
        block_ids: list[int] = []  # of the blocks that are written, one request after the other
        shifts: list[int] = []  # from a place in a request's table to the place in block_ids
        for rows in scheduled:
            first, last = rows.start // block_size, (rows.start + rows.num_tokens - 1) // block_size
            shifts.append(len(block_ids) - first)
            block_ids += [0] * (last + 1 - first) if rows.recompute_only else rows.block_table[first : last + 1]
        blocks, slots = self._blocks[:num_rows], self._slots[:num_rows]
        np.divmod(self._positions.numpy()[:num_rows], block_size, out=(blocks, slots))
        blocks += np.repeat(shifts, [rows.num_tokens for rows in scheduled])
        np.take(np.array(block_ids), blocks, out=blocks)
