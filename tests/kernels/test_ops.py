"""The ops that go row by row: against the formulas in float64, and bit for bit whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import dispatch, ops
from kernels.cpu.native import NativeKernelsError
from kernels.reference import top_k as reference_top_k
from tests.kernels.conftest import UseKernels

any_kernels = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
rows, sizes = st.integers(0, 40), st.one_of(st.integers(1, 300), st.sampled_from([16, 64, 128, 576]))


@any_kernels
@given(num_rows=rows, size=sizes, magnitude=st.sampled_from([1e-6, 1.0, 1e6]))
def test_rms_norm(kernels: UseKernels, num_rows: int, size: int, magnitude: float) -> None:
    x, weight = torch.randn(num_rows, size) * magnitude, torch.randn(size)
    wide = x.double()
    right = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), right, rtol=2e-6, atol=1e-12)


@any_kernels
@given(num_rows=rows, size=sizes)
def test_fused_add_rms_norm_changes_the_residual_in_place(kernels: UseKernels, num_rows: int, size: int) -> None:
    x, residual, weight = torch.randn(num_rows, size), torch.randn(num_rows, size), torch.randn(size)
    total = x + residual
    out = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-5))


def test_a_residual_that_is_not_contiguous_is_changed_too(kernels: UseKernels) -> None:
    x, whole, weight = torch.randn(3, 20), torch.randn(20, 3), torch.randn(20)
    residual = whole.T
    total = x + residual
    out = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(whole.T, total)
    torch.testing.assert_close(out, ops.rms_norm(total, weight, 1e-5))


def angles_of(num_rows: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.randn(num_rows, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    return angles, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@any_kernels
@given(num_rows=rows, heads=st.integers(1, 5), half=st.one_of(st.integers(1, 40), st.just(64)), is_apart=st.booleans())
def test_rotary_embedding_is_hugging_faces(
    kernels: UseKernels, num_rows: int, heads: int, half: int, is_apart: bool
) -> None:
    """Rows side by side, and apart as they are in the product that made them."""
    x = torch.randn(num_rows, heads + 2, 2 * half)[:, :heads]
    angles, cos, sin = angles_of(num_rows, 2 * half)
    out = ops.rotary_embedding(x if is_apart else x.contiguous(), cos, sin)
    whole = torch.cat((angles, angles), -1)
    right, _ = apply_rotary_pos_emb(x[None], x[None], whole.cos()[None], whole.sin()[None], unsqueeze_dim=2)
    torch.testing.assert_close(out, right[0], rtol=1e-5, atol=1e-6)


@any_kernels
@given(num_rows=rows, size=sizes)
def test_silu_and_mul(kernels: UseKernels, num_rows: int, size: int) -> None:
    x = torch.randn(num_rows, 2 * size) * 4
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(ops.silu_and_mul(x).double(), gate * gate.sigmoid() * up, rtol=2e-6, atol=1e-12)


@any_kernels
@given(
    num_rows=st.integers(0, 20),
    size=st.integers(1, 150),
    k=st.integers(1, 150),
    numbers=st.sampled_from([[0.0, 1.0], [float("-inf"), float("nan"), -1.0], [float("inf"), 3.0, float("nan")]]),
)
def test_top_k_with_ties_nan_and_infinity(
    kernels: UseKernels, num_rows: int, size: int, k: int, numbers: list[float]
) -> None:
    """Half of the numbers are alike; k is as much as there is, where it would be more."""
    k = min(k, size)
    x = torch.randn(num_rows, size).round(decimals=1)
    alike = torch.tensor(numbers)[torch.randint(0, len(numbers), x.shape)]
    x = torch.where(torch.rand(x.shape) < 0.5, alike, x)
    values, ids = ops.top_k(x, k)
    for got, right in zip((values, ids), reference_top_k(x, k), strict=True):
        assert got.dtype == right.dtype
        assert torch.equal(got, right)


def test_top_k_of_a_vocabulary(kernels: UseKernels) -> None:
    x = torch.randn(3, 50_001)
    for got, right in zip(ops.top_k(x, 64), x.topk(64), strict=True):
        assert torch.equal(got, right)


# --- a row's result depends on nothing but the row ------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(native_kernels: UseKernels) -> None:
    torch.manual_seed(4)
    x, more, weight = torch.randn(70, 2, 100), torch.randn(70, 200), torch.randn(200)
    _, cos, sin = angles_of(70, 100)

    def results(some: slice) -> list[torch.Tensor]:
        flat, residual = x[some].flatten(1), more[some].clone()
        return [
            ops.rms_norm(flat, weight, 1e-5),
            ops.fused_add_rms_norm(flat, residual, weight, 1e-5),
            residual,
            ops.rotary_embedding(x[some], cos[some], sin[some]),
            ops.silu_and_mul(flat),
            *ops.top_k(flat, 9),
        ]

    native_kernels(1)
    whole = results(slice(0, 70))
    for num_threads in (1, 2, 3):
        native_kernels(num_threads)
        for some in (slice(0, 70), slice(0, 1), slice(69, 70), slice(5, 20), slice(16, 33), slice(1, 50)):
            for got, right in zip(results(some), whole, strict=True):
                assert torch.equal(got, right[some]), f"{num_threads} threads, rows {some}"


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_copy_blocks_copies_all_layers_in_order(kernels: UseKernels) -> None:
    pool = torch.randn(6, 2, 2, 1, 8, 4)
    before = pool.clone()
    ops.copy_blocks(pool, pool, torch.tensor([[2, 5], [1, 2]]))  # 2 is read, then written
    assert torch.equal(pool[[5, 2]], before[[2, 1]])
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_copy_blocks_between_pools(kernels: UseKernels, dtype: torch.dtype) -> None:
    pool, host = torch.randint(-9, 9, (6, 2, 2, 1, 8, 4)).to(dtype), torch.zeros(3, 2, 2, 1, 8, 4).to(dtype)
    ops.copy_blocks(pool, host, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(host.float()[[0, 2]], pool.float()[[4, 1]])
    assert not host[1].float().any()


def test_copying_no_blocks_changes_nothing(kernels: UseKernels) -> None:
    pool = torch.randn(2, 1, 2, 1, 8, 4)
    before = pool.clone()
    ops.copy_blocks(pool, pool, torch.zeros(0, 2, dtype=torch.int64))
    assert torch.equal(pool, before)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused(kernels: UseKernels) -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"rms_norm: shapes do not fit: \(2, 6\), \(5,\)"):
        ops.rms_norm(x, torch.zeros(5), 1e-5)
    with pytest.raises(ValueError, match="rotary_embedding"):
        ops.rotary_embedding(torch.zeros(2, 3, 8), torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="silu_and_mul"):
        ops.silu_and_mul(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="top_k of 7"):
        ops.top_k(x, 7)
    with pytest.raises(ValueError, match="copy_blocks"):
        ops.copy_blocks(torch.zeros(3, 1, 2, 1, 8, 4), torch.zeros(3, 1, 2, 1, 16, 4), torch.tensor([[1, 2]]))


def test_every_registered_kernel_exists(kernels: UseKernels) -> None:
    for op in dispatch.picked("cpu"):
        assert callable(dispatch.implementation(op, "cpu"))


def test_what_nothing_serves_is_named(kernels: UseKernels) -> None:
    with pytest.raises(LookupError, match=r"no kernels for device 'abacus', there are kernels for \['cpu'\]"):
        dispatch.implementation("rms_norm", "abacus")
    with pytest.raises(LookupError, match="no kernel 'conv' for device 'cpu'"):
        dispatch.implementation("conv", "cpu")
    with pytest.raises(NativeKernelsError, match="no kernels for 'abacus' here, there are"):
        dispatch.use_cpu_kernels("abacus")
