"""How the rows of one flat batch attend: index tensors built once a step and read by every layer. Knows no model.

The pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. Seen as a table of rows
`[num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim]`, one row is one head of K or V of one layer of
one block; row numbers of layer 0 are kept here, and layer l is `l * 2 * num_kv_heads` further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MIN_ROWS_TOGETHER = 4
"""Fewer one-row requests than this are quicker one by one (measured on one core, contexts of 40 to 1,000 tokens)."""


class ScratchMemory:
    """Flat memory that grows to the largest size asked and is used again for every step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, num_items: int) -> torch.Tensor:
        if self._memory.numel() < num_items:
            self._memory = torch.empty(num_items, dtype=self._memory.dtype)
        return self._memory


@dataclass(frozen=True)
class PoolShape:
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int


@dataclass(frozen=True)
class OneSequence:
    """Rows first_row .. first_row + num_rows of one request; the last of them attends `context` positions.

    kv_rows: pool rows of layer 0 in order (K or V, head, block).
    """

    first_row: int
    num_rows: int
    context: int
    kv_rows: torch.Tensor


@dataclass(frozen=True)
class RowsTogether:
    """One-row requests that are computed in one go over all their blocks.

    rows: [R] their rows in the batch. lengths: [R] how many blocks each has, N in all.
    segment: [N] for each block, which of the R it belongs to.
    kv_rows: pool rows of layer 0 in order (K or V, block, head).
    tail_mask: bool [N, 1, block_size], True at slots past the end of a sequence.
    last: [R] which of the N blocks is a request's last one.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    segment: torch.Tensor
    kv_rows: torch.Tensor
    tail_mask: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """scratch: flat, of the pool's dtype, as large as the largest gather; each layer overwrites it."""

    shape: PoolShape
    one_by_one: tuple[OneSequence, ...]
    together: RowsTogether | None
    scratch: torch.Tensor


def make_plan(
    shape: PoolShape,
    query_lens: Sequence[int],
    contexts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    scratch_memory: ScratchMemory,
) -> AttentionPlan:
    """scratch_memory: gives flat memory for so many items, the same again for every plan.
    query_lens: rows of each request, in batch order. contexts: tokens that its last row attends, itself included.
    block_tables: at least ceil(context / block_size) block ids of each request."""
    first_rows = np.concatenate([[0], np.cumsum(query_lens)[:-1]]).astype(np.int64)
    singles = [i for i, n in enumerate(query_lens) if n == 1]
    if len(singles) < MIN_ROWS_TOGETHER:
        singles = []
    single_set = set(singles)
    tables = [np.asarray(t[: -(-c // shape.block_size)], np.int64) for t, c in zip(block_tables, contexts, strict=True)]
    one_by_one = tuple(
        OneSequence(int(first_rows[i]), query_lens[i], contexts[i], _kv_rows_by_head(shape, tables[i]))
        for i in range(len(query_lens))
        if i not in single_set
    )
    together = _together(shape, first_rows[singles], [contexts[i] for i in singles], [tables[i] for i in singles])
    gathered = [len(sequence.kv_rows) for sequence in one_by_one] + ([len(together.kv_rows)] if together else [])
    scratch = scratch_memory(max(gathered) * shape.block_size * shape.head_dim)
    return AttentionPlan(shape, one_by_one, together, scratch)


def _first_rows_of(shape: PoolShape, blocks: np.ndarray) -> np.ndarray:
    return blocks * (shape.num_layers * 2 * shape.num_kv_heads)


def _kv_rows_by_head(shape: PoolShape, blocks: np.ndarray) -> torch.Tensor:
    heads = np.arange(2 * shape.num_kv_heads)[:, None]
    return torch.from_numpy((_first_rows_of(shape, blocks)[None, :] + heads).reshape(-1))


def _kv_rows_by_block(shape: PoolShape, blocks: np.ndarray) -> torch.Tensor:
    heads = np.arange(2 * shape.num_kv_heads).reshape(2, 1, shape.num_kv_heads)
    return torch.from_numpy((_first_rows_of(shape, blocks)[None, :, None] + heads).reshape(-1))


def _together(
    shape: PoolShape, rows: np.ndarray, contexts: list[int], tables: list[np.ndarray]
) -> RowsTogether | None:
    if not tables:
        return None
    lens = np.array([len(t) for t in tables])
    last = np.cumsum(lens) - 1
    num_valid = np.full(int(lens.sum()), shape.block_size)
    num_valid[last] = np.array(contexts) - (lens - 1) * shape.block_size
    tail = np.arange(shape.block_size)[None, None, :] >= num_valid[:, None, None]
    return RowsTogether(
        rows=torch.from_numpy(rows),
        lengths=torch.from_numpy(lens),
        segment=torch.from_numpy(np.repeat(np.arange(len(tables)), lens)),
        kv_rows=_kv_rows_by_block(shape, np.concatenate(tables)),
        tail_mask=torch.from_numpy(tail),
        last=torch.from_numpy(last),
    )
