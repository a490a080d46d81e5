"""Paged attention of a flat mixed batch against plain dense attention, request by request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.plan import AttentionShape, make_plan
from kernels.reference_attention import TILE_ROWS
from kernels.types import AttentionOptions

requests = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))),  # tokens before, rows of this step
    min_size=1,
    max_size=9,
)


class Scene:
    """A pool with the KV of some requests in shuffled blocks; every slot that is nobody's holds NaN."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        block_size: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(seed)
        self.layer, head_dim = 1, 8
        self.scale = head_dim**-0.5
        self.shape = AttentionShape(3, kv_heads * group, kv_heads, block_size, head_dim, dtype)
        self.lens = lens
        contexts = [before + rows for before, rows in lens]
        num_blocks = [-(-c // block_size) for c in contexts]
        ids = np.random.default_rng(seed).permutation(sum(num_blocks)) + 1
        self.tables = [t.tolist() for t in np.split(ids, np.cumsum(num_blocks)[:-1])]
        self.pool = torch.full((sum(num_blocks) + 1, 3, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        self.kv = [torch.randn(c, 2, kv_heads, head_dim).to(dtype) for c in contexts]
        self.q = torch.randn(sum(rows for _, rows in lens), kv_heads * group, head_dim).to(dtype)
        self.plan = make_plan(self.shape, [n for _, n in lens], contexts, self.tables, *self._write_slots())

    def _write_slots(self) -> tuple[np.ndarray, np.ndarray]:
        places = [
            (table[position // self.shape.block_size], position % self.shape.block_size)
            for (before, rows), table in zip(self.lens, self.tables, strict=True)
            for position in range(before, before + rows)
        ]
        return np.array([b for b, _ in places], np.int64), np.array([o for _, o in places], np.int64)

    def fill_history(self) -> None:
        """The slots of earlier steps, written one by one."""
        for (before, _), table, kv in zip(self.lens, self.tables, self.kv, strict=True):
            for position in range(before):
                block, offset = table[position // self.shape.block_size], position % self.shape.block_size
                self.pool[block, self.layer, :, :, offset] = kv[position]

    def attend(self) -> torch.Tensor:
        self.fill_history()
        new = torch.cat([kv[before:] for (before, _), kv in zip(self.lens, self.kv, strict=True)])
        ops.write_kv(new[:, 0], new[:, 1], self.pool, self.layer, self.plan)
        return ops.paged_attention(self.q, self.pool, self.layer, self.plan, AttentionOptions(self.scale))

    def dense(self) -> torch.Tensor:
        """Row by row, in float64."""
        out, first = [], 0
        for (before, rows), kv in zip(self.lens, self.kv, strict=True):
            for row in range(rows):
                k, v = kv[: before + row + 1].double().unbind(1)
                q = self.q[first + row].double().view(self.shape.num_kv_heads, -1, self.shape.head_dim)
                weights = (torch.einsum("hgd,shd->hgs", q, k) * self.scale).softmax(-1)
                out.append(torch.einsum("hgs,shd->hgd", weights, v).reshape(-1, self.shape.head_dim))
            first += rows
        return torch.stack(out)


@settings(max_examples=80, deadline=None)
@given(
    requests,
    st.sampled_from([8, 16, 32]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 4]),
    st.integers(0, 2**31),
)
def test_equals_dense_attention_and_reads_no_slot_past_a_sequence(
    lens: list[tuple[int, int]], block_size: int, kv_heads: int, group: int, seed: int
) -> None:
    scene = Scene(lens, block_size, kv_heads, group, seed)
    torch.testing.assert_close(scene.attend().double(), scene.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS, 2 * TILE_ROWS + 1])
@pytest.mark.parametrize("before", [0, 15, 16, 100])
def test_chunks_around_the_edges_of_tiles(rows: int, before: int) -> None:
    scene = Scene([(before, rows), (7, 1)])
    torch.testing.assert_close(scene.attend().double(), scene.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools_are_computed_in_float32(dtype: torch.dtype) -> None:
    scene = Scene([(40, 1), (3, 20), (16, 1)], dtype=dtype)
    out = scene.attend()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), scene.dense(), rtol=1e-2, atol=1e-2)  # the rounding of the result


def test_result_of_a_request_does_not_depend_on_the_batch() -> None:
    """Bit for bit, for the same rows of the same request: native kernels may rely on the same."""
    mixed = Scene([(33, 1), (5, 12), (70, 1)])
    together = mixed.attend().clone()
    alone = make_plan(mixed.shape, [1], [71], mixed.tables[2:], *[w[-1:] for w in mixed._write_slots()])
    out = ops.paged_attention(mixed.q[-1:], mixed.pool, mixed.layer, alone, AttentionOptions(mixed.scale))
    assert torch.equal(out, together[-1:])


def test_write_kv_touches_its_slots_of_its_layer_only() -> None:
    scene = Scene([(5, 3), (20, 1)])
    scene.pool.fill_(7.0)
    k, v = torch.randn(2, 4, scene.shape.num_kv_heads, scene.shape.head_dim)
    ops.write_kv(k, v, scene.pool, scene.layer, scene.plan)
    for row, (block, offset) in enumerate(zip(*scene._write_slots(), strict=True)):
        assert torch.equal(scene.pool[block, scene.layer, 0, :, offset], k[row])
        assert torch.equal(scene.pool[block, scene.layer, 1, :, offset], v[row])
    assert int((scene.pool != 7.0).sum()) == 2 * k.numel()


def test_shapes_that_do_not_fit_are_refused() -> None:
    scene = Scene([(5, 3)])
    with pytest.raises(ValueError, match="paged_attention: shapes do not fit"):
        ops.paged_attention(scene.q[:2], scene.pool, 0, scene.plan, AttentionOptions(1.0))
    with pytest.raises(ValueError, match="write_kv: shapes do not fit"):
        ops.write_kv(scene.q, scene.q, scene.pool, 0, scene.plan)
