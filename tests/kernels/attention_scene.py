"""Sequences with their KV in a pool, and the attention that they should get, in float64 over what the pool holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import ops
from kernels.plan import AttentionPlan, AttentionShape, make_plan
from kernels.types import AttentionOptions, KVScales

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Form:
    """How a scene's heads and numbers look."""

    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_dim**-0.5, self.soft_cap, self.window)

    def shape(self, block_size: int) -> AttentionShape:
        return AttentionShape(
            NUM_LAYERS, self.kv_heads * self.group, self.kv_heads, block_size, self.head_dim, self.dtype
        )

    def scales(self) -> KVScales | None:
        """Another one for each layer and head, so that a wrong one shows."""
        if self.dtype not in (torch.int8, torch.float8_e4m3fn):
            return None
        size = 1 / 32 if self.dtype == torch.int8 else 1 / 4
        steps = torch.arange(NUM_LAYERS * self.kv_heads, dtype=torch.float32).view(NUM_LAYERS, -1)
        return KVScales(size * (1 + steps / 8), size * (2 - steps / 16))


@dataclass(frozen=True)
class Sequence:
    """q [C, num_heads, head_dim]; k, v [C, kv_heads, head_dim]; of every position."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_sequence(form: Form, num_tokens: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(num_tokens, heads, form.head_dim, generator=generator)
        for heads in (form.kv_heads * form.group, form.kv_heads, form.kv_heads)
    )
    return Sequence(q, k, v)


def nobodys(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What stands in slots that no sequence has: NaN, or the largest number where there is none."""
    if dtype == torch.int8:
        return torch.full(shape, 127, dtype=dtype)
    return torch.full(shape, float("nan")).to(dtype)


class Scene:
    """The KV of some sequences, all their positions written, in shuffled blocks of one pool."""

    def __init__(self, form: Form, sequences: list[Sequence], block_size: int = 16, seed: int = 0) -> None:
        self.form, self.sequences, self.block_size = form, sequences, block_size
        lens = [len(sequence.q) for sequence in sequences]
        counts = [-(-length // block_size) for length in lens]
        spare = 3  # blocks that are nobody's, somewhere among the others
        ids = np.random.default_rng(seed).permutation(sum(counts) + spare)[: sum(counts)] + 1
        self.tables = [table.tolist() for table in np.split(ids, np.cumsum(counts)[:-1])] if counts else []
        shape = (sum(counts) + spare + 1, NUM_LAYERS, 2, form.kv_heads, block_size, form.head_dim)
        self.pool = nobodys(shape, form.dtype)
        if sequences:
            k, v = (torch.cat([getattr(sequence, name) for sequence in sequences]) for name in "kv")
            ops.write_kv(k, v, self.pool, LAYER, self.plan([(length, length) for length in lens]), form.scales())

    def plan(self, rows: list[tuple[int, int]]) -> AttentionPlan:
        """rows: (how many, context of the last of them) of each sequence."""
        places = [
            (table[position // self.block_size], position % self.block_size)
            for (count, end), table in zip(rows, self.tables, strict=True)
            for position in range(end - count, end)
        ]
        slots = np.array(places, np.int64).reshape(-1, 2)
        counts, ends = [count for count, _ in rows], [end for _, end in rows]
        return make_plan(self.form.shape(self.block_size), counts, ends, self.tables, slots[:, 0], slots[:, 1])

    def query(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        picked = [sequence.q[end - count : end] for (count, end), sequence in zip(rows, self.sequences, strict=True)]
        heads = self.form.kv_heads * self.form.group
        return torch.cat([torch.zeros(0, heads, self.form.head_dim), *picked])

    def attend(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        return ops.paged_attention(
            self.query(rows), self.pool, LAYER, self.plan(rows), self.form.options, self.form.scales()
        )

    def stored(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence as the pool has them, float64 [C, kv_heads, head_dim]."""
        blocks = self.pool[self.tables[number], LAYER].double()  # [blocks, 2, kv_heads, block_size, head_dim]
        scales = self.form.scales()
        if scales is not None:
            blocks *= torch.stack((scales.key[LAYER], scales.value[LAYER])).double()[None, :, :, None, None]
        flat = blocks.permute(1, 0, 3, 2, 4).reshape(2, -1, self.form.kv_heads, self.form.head_dim)
        k, v = flat[:, : len(self.sequences[number].q)]
        return k, v

    def dense(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        """The right answer to `attend`, float64."""
        form, found = self.form, [self.query([]) if not rows else self.query(rows)[:0]]
        for number, (count, end) in enumerate(rows):
            k, v = (x[:end] for x in self.stored(number))
            q = self.sequences[number].q[end - count : end].double().view(count, form.kv_heads, -1, form.head_dim)
            scores = torch.einsum("rhgd,shd->rhgs", q, k) * form.options.scale
            if form.soft_cap:
                scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
            row, position = torch.arange(end - count, end)[:, None], torch.arange(end)
            hidden = position > row
            if form.window:
                hidden |= position <= row - form.window
            weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
            found.append(torch.einsum("rhgs,shd->rhgd", weights, v).reshape(count, -1, form.head_dim))
        return torch.cat([x.double() for x in found])
