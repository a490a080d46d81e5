"""How the rows of one flat batch attend: index tensors and views made once a step and used by every layer.

The pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. Seen as a table of rows
`[num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim]`, one row is one head of K or V of one layer of one
block; row numbers of layer 0 are kept here, and layer l is `l * 2 * num_kv_heads` further. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

TILE_ROWS = 32
"""Rows of one sequence that attend together. Measured on one core: 32 and 64 are alike, fewer and more are slower."""


class Scratch:
    """Flat buffers by name that grow to the largest size asked for and are used again for every step.

    Fresh memory for each layer would cost more than what is done in it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, num_items: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[num_items], uninitialised; whoever asks for the same name and dtype next gets the same memory."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < num_items:
            buffer = self._buffers[name, dtype] = torch.empty(num_items, dtype=dtype)
        return buffer[:num_items]


@dataclass(frozen=True)
class AttentionShape:
    """dtype: of the pool; scores and probabilities are float32 whatever it is."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Tile:
    """Up to TILE_ROWS rows of one sequence against the S positions that the last of them may see.

    query, output: [num_kv_heads, G, head_dim] for one row, [num_kv_heads, G, num_rows, head_dim] for more (G query
        heads share a KV head), views of the plan's buffers. scores: [num_kv_heads, G * num_rows, S].
    key: [num_kv_heads, head_dim, S]. value: [num_kv_heads, S, head_dim]. They end at S: no slot past it is read.
    own: scores of the rows among themselves [num_kv_heads, G, num_rows, num_rows], to which `mask` is added;
        None for one row, which sees all.
    """

    query: torch.Tensor
    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor
    own: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SequencePlan:
    """kv_rows: rows of the table to gather, in the order (K or V, head, block), into `gathered`.
    widened: the same in float32, when the pool's dtype is another."""

    kv_rows: torch.Tensor
    gathered: torch.Tensor
    widened: torch.Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """key_rows, value_rows: int64 [N, num_kv_heads], where each row's K and V go, in the table's rows of one slot
    `[..., head_dim]`. query, output: float32 [N, num_heads, head_dim], used again by every layer and every plan."""

    shape: AttentionShape
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    query: torch.Tensor
    output: torch.Tensor
    sequences: tuple[SequencePlan, ...]

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]


def make_plan(
    shape: AttentionShape,
    query_lens: Sequence[int],
    contexts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    write_blocks: np.ndarray,
    write_offsets: np.ndarray,
    scratch: Scratch,
) -> AttentionPlan:
    """The plan of a step; it is good until the next one is made with the same scratch memory.

    query_lens: rows of each request, in batch order. contexts: positions that its last row attends, its own included.
    block_tables: at least ceil(context / block_size) block ids of each request.
    write_blocks, write_offsets: int64 [N], block and slot that each row's K and V are written to.
    """
    key_rows, value_rows = _slot_rows(shape, write_blocks, write_offsets)
    size = (sum(query_lens), shape.num_heads, shape.head_dim)
    query = scratch.take("query", size[0] * size[1] * size[2]).view(size)
    output = scratch.take("output", size[0] * size[1] * size[2]).view(size)
    sequences, first_row = [], 0
    for num_rows, context, table in zip(query_lens, contexts, block_tables, strict=True):
        rows = slice(first_row, first_row + num_rows)
        sequences.append(_plan_sequence(shape, query[rows], output[rows], context, table, scratch))
        first_row += num_rows
    return AttentionPlan(shape, key_rows, value_rows, query, output, tuple(sequences))


def _slot_rows(shape: AttentionShape, blocks: np.ndarray, offsets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    heads = np.arange(2 * shape.num_kv_heads)
    rows = (_first_rows_of(shape, blocks)[:, None] + heads) * shape.block_size + offsets[:, None]
    found = torch.from_numpy(rows)
    return found[:, : shape.num_kv_heads], found[:, shape.num_kv_heads :]


def _first_rows_of(shape: AttentionShape, blocks: np.ndarray) -> np.ndarray:
    return blocks * (shape.num_layers * 2 * shape.num_kv_heads)


def _plan_sequence(
    shape: AttentionShape,
    query: torch.Tensor,
    output: torch.Tensor,
    context: int,
    block_table: Sequence[int],
    scratch: Scratch,
) -> SequencePlan:
    num_blocks = -(-context // shape.block_size)
    blocks = np.asarray(block_table[:num_blocks], np.int64)
    heads = np.arange(2 * shape.num_kv_heads)[:, None]
    kv_rows = torch.from_numpy((_first_rows_of(shape, blocks) + heads).reshape(-1))
    size = (kv_rows.numel(), shape.block_size * shape.head_dim)
    kv = gathered = scratch.take("gathered", size[0] * size[1], shape.dtype).view(size)
    widened = None
    if shape.dtype != torch.float32:
        kv = widened = scratch.take("widened", size[0] * size[1]).view(size)
    key, value = kv.view(2, shape.num_kv_heads, -1, shape.head_dim)
    tiles = []
    for start in range(0, query.shape[0], TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, query.shape[0]))
        seen = context - query.shape[0] + rows.stop
        tiles.append(_make_tile(query[rows], output[rows], key[:, :seen], value[:, :seen], scratch))
    return SequencePlan(kv_rows, gathered, widened, tuple(tiles))


def _make_tile(
    query: torch.Tensor, output: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scratch: Scratch
) -> Tile:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, seen, _ = key.shape
    scores = scratch.take("scores", num_heads * num_rows * seen).view(num_kv_heads, -1, seen)
    by_head = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    if num_rows == 1:
        query, output = query.view(by_head), output.view(by_head)
        return Tile(query, output, key.transpose(1, 2), value, scores, None, None)
    query = query.view(num_rows, *by_head).permute(1, 2, 0, 3)
    output = output.view(num_rows, *by_head).permute(1, 2, 0, 3)
    own = scores.view(num_kv_heads, -1, num_rows, seen)[..., seen - num_rows :]
    return Tile(query, output, key.transpose(1, 2), value, scores, own, _causal_mask(num_rows))


def _causal_mask(num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, num_rows), float("-inf")).triu_(1)
