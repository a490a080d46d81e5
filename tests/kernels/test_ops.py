"""The small ops against the formulas, and what the dispatch says when there is nothing to dispatch to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import dispatch, ops


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    right = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), right)


def test_fused_add_rms_norm_changes_the_residual_in_place() -> None:
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    total = x + residual
    out = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-5))


def test_rotary_embedding_is_hugging_faces() -> None:
    x, angles = torch.randn(7, 3, 16), torch.randn(7, 8)
    cos, sin = angles.cos(), angles.sin()
    out = ops.rotary_embedding(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    whole = torch.cat((angles, angles), -1)
    right, _ = apply_rotary_pos_emb(x[None], x[None], whole.cos()[None], whole.sin()[None], unsqueeze_dim=2)
    torch.testing.assert_close(out, right[0])


def test_silu_and_mul() -> None:
    x = torch.randn(4, 20)
    torch.testing.assert_close(ops.silu_and_mul(x), x[:, :10] * x[:, :10].sigmoid() * x[:, 10:])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 100), st.integers(1, 40), st.booleans())
def test_packed_linear_equals_the_product(num_in: int, num_out: int, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_in * 1000 + num_out)
    weight, x = torch.randn(num_out, num_in), torch.randn(num_rows, num_in)
    bias = torch.randn(num_out) if has_bias else None
    right = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    got = ops.linear(x, ops.pack_weight(weight), bias)
    assert got.shape == (num_rows, num_out)
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_in_half_precision(dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 64).to(dtype), torch.randn(3, 64).to(dtype)
    got = ops.linear(x, ops.pack_weight(weight))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)


def test_copy_blocks_copies_all_layers_in_order() -> None:
    pool = torch.randn(6, 2, 2, 1, 8, 4)
    before = pool.clone()
    ops.copy_blocks(pool, pool, torch.tensor([[2, 5], [1, 2]]))  # 2 is read, then written
    assert torch.equal(pool[[5, 2]], before[[2, 1]])
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_copy_blocks_between_pools() -> None:
    pool, host = torch.randn(6, 2, 2, 1, 8, 4), torch.zeros(3, 2, 2, 1, 8, 4)
    ops.copy_blocks(pool, host, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(host[[0, 2]], pool[[4, 1]])
    assert not host[1].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"rms_norm: shapes do not fit: \(2, 6\), \(5,\)"):
        ops.rms_norm(x, torch.zeros(5), 1e-5)
    with pytest.raises(ValueError, match="rotary_embedding"):
        ops.rotary_embedding(torch.zeros(2, 3, 8), torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="silu_and_mul"):
        ops.silu_and_mul(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="copy_blocks"):
        ops.copy_blocks(torch.zeros(3, 1, 2, 1, 8, 4), torch.zeros(3, 1, 2, 1, 16, 4), torch.tensor([[1, 2]]))


def test_every_registered_kernel_exists() -> None:
    for op in dispatch.picked("cpu"):
        assert callable(dispatch.implementation(op, "cpu"))


def test_what_nothing_serves_is_named() -> None:
    with pytest.raises(LookupError, match=r"no kernels for device 'abacus', there are kernels for \['cpu'\]"):
        dispatch.implementation("rms_norm", "abacus")
    with pytest.raises(LookupError, match="no kernel 'conv' for device 'cpu'"):
        dispatch.implementation("conv", "cpu")
