"""A layer in one call: the same bits as its ops one by one, whatever the weights, the batch and the threads."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.plan import AttentionPlan, AttentionShape, make_plan
from kernels.types import AttentionOptions, DecoderLayerParts, QuantizedWeight, quantize
from tests.kernels.conftest import UseKernels

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYER, BLOCK_SIZE = 64, 96, 4, 2, 24, 1, 8
TABLES = [[3, 9, 1, 7], [5, 2]]
FORMATS = ["float32", "bfloat16", "int8", "int8-32", "int4-32"]


def make_weight(form: str, num_out: int, num_in: int) -> torch.Tensor | QuantizedWeight:
    weight = torch.randn(num_out, num_in) / num_in**0.5
    if form in ("float32", "bfloat16"):
        return weight.to(getattr(torch, form))
    kind, _, group_size = form.partition("-")
    return quantize(weight, kind, int(group_size or 0))


def make_parts(form: str, has_bias: bool, attention: AttentionOptions) -> DecoderLayerParts:
    """The down projection is of 96 inputs: not a multiple of the 64 that share a scale where a weight has no groups."""
    torch.manual_seed(5)
    shapes = [
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        (HIDDEN, HEADS * HEAD_DIM),
        (2 * INNER, HIDDEN),
        (HIDDEN, INNER),
    ]
    weights = [ops.pack_weight(make_weight(form, *shape)) for shape in shapes]
    biases = tuple(torch.randn(num_out) if has_bias else None for num_out, _ in shapes)
    norms = torch.randn(2, HIDDEN)
    return DecoderLayerParts(LAYER, HEADS, HEAD_DIM, 1e-5, norms[0], norms[1], *weights, biases, attention)


def make_batch(rows: list[tuple[int, int]], dtype: torch.dtype) -> AttentionPlan:
    places = [
        (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
        for (count, end), table in zip(rows, TABLES, strict=False)
        for position in range(end - count, end)
    ]
    blocks, offsets = (torch.tensor(places).reshape(-1, 2)[:, i].numpy() for i in (0, 1))
    shape = AttentionShape(2, HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype)
    return make_plan(shape, [n for n, _ in rows], [end for _, end in rows], TABLES[: len(rows)], blocks, offsets)


def make_inputs(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    residual, angles = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, HEAD_DIM)
    return residual, angles.cos(), angles.sin()


def make_pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(10, 2, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)


def one_by_one(
    parts: DecoderLayerParts,
    residual: torch.Tensor,
    pool: torch.Tensor,
    plan: AttentionPlan,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    residual = residual.clone()
    normed = ops.rms_norm(residual, parts.input_norm, parts.eps)
    qkv = ops.linear(normed, parts.qkv, parts.biases[0]).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
    rotated = ops.rotary_embedding(qkv[:, : HEADS + KV_HEADS], cos, sin)
    ops.write_kv(rotated[:, HEADS:], qkv[:, HEADS + KV_HEADS :], pool, parts.number, plan)
    seen = ops.paged_attention(rotated[:, :HEADS], pool, parts.number, plan, parts.attention)
    out = ops.linear(seen.flatten(1), parts.out, parts.biases[1])
    normed = ops.fused_add_rms_norm(out, residual, parts.post_norm, parts.eps)
    inner = ops.silu_and_mul(ops.linear(normed, parts.gate_up, parts.biases[2]))
    return residual + ops.linear(inner, parts.down, parts.biases[3])


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("form", FORMATS)
def test_equals_its_ops_bit_for_bit(native_kernels: UseKernels, form: str, has_bias: bool, is_exact: bool) -> None:
    for options in (AttentionOptions(0.2), AttentionOptions(0.3, 5.0, 7)):
        for dtype in (torch.float32, torch.bfloat16):
            native_kernels(is_exact=is_exact)
            parts = make_parts(form, has_bias, options)
            fused = ops.fuse_layer(parts)
            assert fused is not None
            for rows in ([(1, 20), (1, 9)], [(25, 30), (1, 9)], [(3, 3)], []):
                residual, cos, sin = make_inputs(sum(n for n, _ in rows))
                pool, plan = make_pool(dtype), make_batch(rows, dtype)
                other_pool = pool.clone()
                right = one_by_one(parts, residual, other_pool, plan, cos, sin)
                fused(residual, pool, plan, cos, sin)
                assert torch.equal(residual, right)
                assert torch.equal(pool, other_pool)


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_batch_and_threads_change_no_bit(native_kernels: UseKernels, form: str) -> None:
    """The first 30 positions of a sequence at once, in pieces, and beside another sequence."""
    residual, cos, sin = make_inputs(30)
    stranger = make_inputs(1)
    found = []
    for num_threads in (1, 2, 3):
        for sizes in ([30], [1] * 30, [7, 16, 7]):
            for has_stranger in (False, True):
                native_kernels(num_threads)
                fused = ops.fuse_layer(make_parts(form, True, AttentionOptions(0.2)))
                assert fused is not None
                pool, out, end = torch.zeros_like(make_pool(torch.float32)), [], 0
                for size in sizes:
                    some, end = slice(end, end + size), end + size
                    rows = [(size, end), *([(1, 1)] if has_stranger else [])]
                    inputs = [
                        torch.cat((mine[some], *([other] if has_stranger else [])))
                        for mine, other in zip((residual, cos, sin), stranger, strict=True)
                    ]
                    fused(inputs[0], pool, make_batch(rows, torch.float32), *inputs[1:])
                    out.append(inputs[0][:size])
                found.append(torch.cat(out))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_rows_of_another_kind_are_refused(native_kernels: UseKernels) -> None:
    fused = ops.fuse_layer(make_parts("float32", False, AttentionOptions(0.2)))
    assert fused is not None
    residual, cos, sin = make_inputs(3)
    pool, plan = make_pool(torch.float32), make_batch([(3, 3)], torch.float32)
    for wrong in (residual.double(), residual[:2], torch.randn(HIDDEN, 3).T):
        with pytest.raises(ValueError, match="a layer wants 3 contiguous rows of float32"):
            fused(wrong, pool, plan, cos, sin)


def test_there_is_none_where_it_could_not_be_right(native_kernels: UseKernels) -> None:
    parts = make_parts("float32", False, AttentionOptions(0.2))
    changed = vars(parts)
    assert ops.fuse_layer(DecoderLayerParts(**(changed | {"input_norm": parts.input_norm.bfloat16()}))) is None
    assert ops.fuse_layer(DecoderLayerParts(**(changed | {"head_dim": 264}))) is None
