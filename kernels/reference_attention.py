"""Paged attention and KV writes in plain torch, in float32 whatever the pool holds.

The pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. Seen as a table of rows
`[num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim]`, one row is one head of K or V of one layer of one
block; row numbers of layer 0 are kept here, and layer l is `l * 2 * num_kv_heads` further.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch

from kernels.plan import AttentionPlan, AttentionShape
from kernels.types import AttentionOptions, KVScales

TILE_ROWS = 32
"""Rows of one sequence that attend together. Measured on one core: 32 and 64 are alike, fewer and more are slower."""

_FP8_MAX = 448.0


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scales: KVScales | None
) -> None:
    key_rows, value_rows = plan.once(_slot_rows)
    shape = plan.shape
    slots = pool.view(-1, shape.head_dim)[layer * 2 * shape.num_kv_heads * shape.block_size :]
    for rows, x, scale in (
        (key_rows, k, None if scales is None else scales.key[layer]),
        (value_rows, v, None if scales is None else scales.value[layer]),
    ):
        slots.index_put_((rows,), _stored(x if scale is None else x * (1 / scale)[:, None], pool.dtype))


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return x.clamp(-127, 127).round().to(torch.int8)
    if dtype == torch.float8_e4m3fn:
        return x.clamp(-_FP8_MAX, _FP8_MAX).to(dtype)
    return x.to(dtype)


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    options: AttentionOptions,
    scales: KVScales | None,
) -> torch.Tensor:
    """One sequence after the other: its K and V are gathered head by head, block after block, then its rows attend tile
    by tile: two matrix products and a softmax."""
    made = plan.once(_prepare)
    table = pool.view(-1, plan.shape.block_size * plan.shape.head_dim)[layer * 2 * plan.shape.num_kv_heads :]
    query = q.to(torch.float32)
    out = torch.empty_like(query)
    for sequence in made.sequences:
        kv = _gathered(table, sequence, plan.shape)
        key, value = kv.view(2, plan.shape.num_kv_heads, -1, plan.shape.head_dim)
        if scales is not None:
            key = key * scales.key[layer][:, None, None]
            value = value * scales.value[layer][:, None, None]
        for tile in sequence.tiles:
            out[tile.rows] = _attend(query[tile.rows], key[:, : tile.seen], value[:, : tile.seen], tile, options)
    return out.to(q.dtype)


# --- what a plan becomes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """Rows of one sequence against the positions that the last of them may see."""

    rows: slice
    seen: int


@dataclass(frozen=True)
class _Sequence:
    """kv_rows: rows of the table to gather, in the order (K or V, head, block)."""

    kv_rows: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _Prepared:
    sequences: tuple[_Sequence, ...]


def _prepare(plan: AttentionPlan) -> _Prepared:
    return _Prepared(tuple(_prepare_sequence(plan, number) for number in range(len(plan.contexts))))


def _prepare_sequence(plan: AttentionPlan, number: int) -> _Sequence:
    shape = plan.shape
    blocks = plan.block_ids[plan.first_blocks[number] : plan.first_blocks[number + 1]].astype(np.int64)
    heads = np.arange(2 * shape.num_kv_heads)[:, None]
    kv_rows = torch.from_numpy((_first_rows_of(shape, blocks) + heads).reshape(-1))
    first, end, context = int(plan.first_rows[number]), int(plan.first_rows[number + 1]), int(plan.contexts[number])
    tiles = []
    for start in range(first, end, TILE_ROWS):
        stop = min(start + TILE_ROWS, end)
        tiles.append(_Tile(slice(start, stop), context - (end - stop)))
    return _Sequence(kv_rows, tuple(tiles))


def _slot_rows(plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    shape = plan.shape
    heads = np.arange(2 * shape.num_kv_heads)
    blocks, offsets = plan.write_blocks.astype(np.int64), plan.write_offsets.astype(np.int64)
    rows = (_first_rows_of(shape, blocks)[:, None] + heads) * shape.block_size + offsets[:, None]
    found = torch.from_numpy(rows)
    return found[:, : shape.num_kv_heads], found[:, shape.num_kv_heads :]


def _first_rows_of(shape: AttentionShape, blocks: np.ndarray) -> np.ndarray:
    return blocks * (shape.num_layers * 2 * shape.num_kv_heads)


# --- one tile --------------------------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """Flat buffers that grow and stay, of each thread: fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, num_items: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < num_items:
            buffer = self._buffers[name, dtype] = torch.empty(num_items, dtype=dtype)
        return buffer[:num_items]


_scratch = _Scratch()


def _gathered(table: torch.Tensor, sequence: _Sequence, shape: AttentionShape) -> torch.Tensor:
    size = (sequence.kv_rows.numel(), shape.block_size * shape.head_dim)
    if shape.dtype == torch.float8_e4m3fn:  # torch gathers bytes, not these
        raw = table.view(torch.uint8).index_select(0, sequence.kv_rows)
        return raw.view(torch.float8_e4m3fn).to(torch.float32)
    gathered = _scratch.take("gathered", size[0] * size[1], shape.dtype).view(size)
    torch.index_select(table, 0, sequence.kv_rows, out=gathered)
    if shape.dtype == torch.float32:
        return gathered
    return _scratch.take("widened", size[0] * size[1]).view(size).copy_(gathered)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: _Tile, options: AttentionOptions
) -> torch.Tensor:
    """query [R, num_heads, head_dim], key and value [num_kv_heads, S, head_dim]; [R, num_heads, head_dim]."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, seen, _ = key.shape
    by_head = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = _scratch.take("scores", num_heads * num_rows * seen).view(num_kv_heads, -1, seen)
    scores.baddbmm_(by_head, key.transpose(1, 2), beta=0, alpha=options.scale)  # beta 0: what it held is ignored
    if options.soft_cap:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    if num_rows > 1 or options.window:
        scores.view(num_kv_heads, -1, num_rows, seen).add_(_mask(num_rows, seen, options.window))
    torch.softmax(scores, -1, out=scores)
    out = torch.bmm(scores, value)
    return out.view(num_kv_heads, -1, num_rows, head_dim).permute(2, 0, 1, 3).reshape(query.shape)


def _mask(num_rows: int, seen: int, window: int) -> torch.Tensor:
    """[R, S]: 0 where a row may look, minus infinity elsewhere; the last row stands at position S - 1."""
    rows, positions = torch.arange(seen - num_rows, seen)[:, None], torch.arange(seen)
    hidden = positions > rows
    if window:
        hidden |= positions <= rows - window
    return torch.zeros(num_rows, seen).masked_fill_(hidden, float("-inf"))
