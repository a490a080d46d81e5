"""Paged attention of a flat mixed batch against plain dense attention, request by request."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.plan import AttentionPlan, AttentionShape, Scratch, make_plan

requests = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))),  # tokens before, rows of this step
    min_size=1,
    max_size=9,
)


class Scene:
    """A pool with the KV of some requests in shuffled blocks; every slot that is nobody's holds NaN."""

    def __init__(self, seed: int, lens: list[tuple[int, int]], block_size: int, kv_heads: int, group: int) -> None:
        torch.manual_seed(seed)
        self.head_dim, self.num_layers, self.layer = 8, 3, 1
        self.lens, self.group, self.block_size = lens, group, block_size
        contexts = [before + rows for before, rows in lens]
        num_blocks = [-(-c // block_size) for c in contexts]
        ids = np.random.default_rng(seed).permutation(sum(num_blocks)) + 1
        self.tables = [t.tolist() for t in np.split(ids, np.cumsum(num_blocks)[:-1])]
        shape = (int(sum(num_blocks)) + 1, self.num_layers, 2, kv_heads, block_size, self.head_dim)
        self.pool = torch.full(shape, float("nan"))
        self.keys = [torch.randn(c, kv_heads, self.head_dim) for c in contexts]
        self.values = [torch.randn(c, kv_heads, self.head_dim) for c in contexts]
        self.q = torch.randn(sum(rows for _, rows in lens), kv_heads * group, self.head_dim)
        self._shape = AttentionShape(self.num_layers, kv_heads * group, kv_heads, block_size, self.head_dim)
        for number in range(len(lens)):
            self._write(number)
        self.plan = self._plan(lens, contexts, self.tables)

    def _plan(self, lens: list[tuple[int, int]], contexts: list[int], tables: list[list[int]]) -> AttentionPlan:
        positions = [np.arange(context - rows, context) for (_, rows), context in zip(lens, contexts, strict=True)]
        blocks = [np.array(t)[p // self.block_size] for t, p in zip(tables, positions, strict=True)]
        return make_plan(
            self._shape,
            [rows for _, rows in lens],
            contexts,
            tables,
            np.concatenate(blocks),
            np.concatenate(positions) % self.block_size,
            Scratch(),
        )

    def _write(self, number: int) -> None:
        """K and V of one request, all its positions."""
        k, v = self.keys[number], self.values[number]
        plan = self._plan([(0, len(k))], [len(k)], [self.tables[number]])
        ops.write_kv(k, v, self.pool, self.layer, plan)

    def dense(self) -> torch.Tensor:
        out, first = [], 0
        for (before, rows), k, v in zip(self.lens, self.keys, self.values, strict=True):
            for row in range(rows):
                seen = before + row + 1
                q = self.q[first + row].view(-1, self.group, self.head_dim)
                scores = torch.einsum("hgd,shd->hgs", q, k[:seen]) * self.head_dim**-0.5
                out.append(torch.einsum("hgs,shd->hgd", scores.softmax(-1), v[:seen]).reshape(-1, self.head_dim))
            first += rows
        return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), requests, st.sampled_from([8, 16, 32]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 3])
)
def test_equals_dense_attention_and_reads_no_slot_past_a_sequence(
    seed: int, lens: list[tuple[int, int]], block_size: int, kv_heads: int, group: int
) -> None:
    scene = Scene(seed, lens, block_size, kv_heads, group)
    out = ops.paged_attention(scene.q, scene.pool, scene.layer, scene.plan, scene.head_dim**-0.5)
    torch.testing.assert_close(out, scene.dense(), rtol=2e-4, atol=2e-5)


def test_copy_blocks_copies_all_layers() -> None:
    pool = torch.randn(5, 2, 2, 1, 8, 4)
    before = pool.clone()
    ops.copy_blocks(pool, torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert torch.equal(pool[3:5], before[1:3])
    assert torch.equal(pool[:3], before[:3])


def test_packed_linear_equals_torch_for_any_number_of_rows() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64), torch.randn(96)
    packed = ops.pack_weight(weight)
    for num_rows in (1, 2, 3, 4, 5, 17, 64, 130):
        x = torch.randn(num_rows, 64)
        for b in (None, bias):
            right = torch.nn.functional.linear(x, weight, b)
            torch.testing.assert_close(ops.linear(x, packed, b), right, rtol=1e-4, atol=1e-4)
