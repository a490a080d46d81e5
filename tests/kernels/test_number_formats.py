"""The pool's number formats, written and read by the kernels as torch converts them, and their functions' accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import ops
from kernels.plan import AttentionPlan, AttentionShape, make_plan
from kernels.types import AttentionOptions
from tests.kernels.conftest import UseKernels

BLOCK_SIZE = 8
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.uint8}
LARGEST = {torch.bfloat16: 3.3895e38, torch.float16: 65504.0, torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Every number that there is of this type."""
    if dtype in (torch.int8, torch.float8_e4m3fn):
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(dtype)


def plan_of(num_tokens: int, head_dim: int, dtype: torch.dtype) -> AttentionPlan:
    """Each token is a sequence of its own, in slot 0 of block token + 1."""
    blocks = np.arange(1, num_tokens + 1)
    tables = [[int(block)] for block in blocks]
    shape = AttentionShape(1, 1, 1, BLOCK_SIZE, head_dim, dtype)
    ones = [1] * num_tokens
    return make_plan(shape, ones, ones, tables, blocks, np.zeros_like(blocks))


def written(x: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """x [N] as the kernels put it into a pool, as V; the end of a row is padded with 0."""
    rows = -(-len(x) // head_dim)
    v = torch.zeros(rows * head_dim)
    v[: len(x)] = x
    pool = torch.zeros(rows + 1, 1, 2, 1, BLOCK_SIZE, head_dim, dtype=dtype)
    v = v.view(rows, 1, head_dim)
    ops.write_kv(torch.zeros_like(v), v, pool, 0, plan_of(rows, head_dim, dtype))
    return pool[1:, 0, 1, 0, 0].reshape(-1)[: len(x)]


def read(stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """stored [N] through attention with one position, which every query gives a weight of 1."""
    rows = len(stored) // head_dim
    pool = torch.zeros(rows + 1, 1, 2, 1, BLOCK_SIZE, head_dim, dtype=stored.dtype)
    pool[1:, 0, 1, 0, 0] = stored.view(rows, head_dim)
    plan = plan_of(rows, head_dim, stored.dtype)
    return ops.paged_attention(torch.zeros(rows, 1, head_dim), pool, 0, plan, AttentionOptions(1.0)).reshape(-1)


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """Every number of the type, what lies halfway between two, and float32's neighbours of these; and any others."""
    if dtype == torch.int8:
        exact = torch.arange(-300, 300) / 2
    else:
        finite = all_of(dtype).float()
        finite = finite[finite.isfinite()].sort().values
        exact = torch.cat((finite, (finite[1:].double() + finite[:-1].double()).div_(2).float()))
    infinity = torch.tensor(float("inf"))
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    edges = [0.0, -0.0, 1e-45, 1.1754944e-38, LARGEST[dtype], LARGEST[dtype] * 1.04, 3.4e38, float("inf")]
    anything = bits.view(torch.float32)
    found = torch.cat((exact, torch.tensor(edges), -torch.tensor(edges), anything[anything.isfinite()]))
    return torch.cat((found, torch.nextafter(found, infinity), torch.nextafter(found, -infinity)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_every_number_reads_as_torch_reads_it(kernels: UseKernels, dtype: torch.dtype, head_dim: int) -> None:
    stored = all_of(dtype)
    right = stored.float()
    if dtype == torch.float8_e4m3fn:  # its two NaN are never written
        stored = torch.where(right.isnan(), torch.zeros(()).to(dtype).view(torch.uint8), stored.view(torch.uint8))
        stored, right = stored.view(dtype), torch.where(right.isnan(), 0.0, right)
    assert torch.equal(read(stored, head_dim).nan_to_num(1.5, 7e38, -7e38), right.nan_to_num(1.5, 7e38, -7e38))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 21])
def test_numbers_are_written_rounded_to_the_nearest(kernels: UseKernels, dtype: torch.dtype, head_dim: int) -> None:
    """Halves to even; fp8 and int8 end at their largest number, the others at infinity."""
    x = hard_to_round(dtype)
    got = written(x, head_dim, dtype)
    if dtype == torch.int8:
        assert torch.equal(got, x.clamp(-127, 127).round().to(torch.int8))
        return
    right = (x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x).to(dtype)
    wrong = got.view(BITS[dtype]) != right.view(BITS[dtype])
    assert not wrong.any(), (x[wrong][:5], got[wrong][:5].float(), right[wrong][:5].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_stays_nan(kernels: UseKernels, dtype: torch.dtype) -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    assert written(bits.view(torch.float32), 16, dtype).isnan().all()


# --- functions ------------------------------------------------------------------------------------------------------


def ulps(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place that float32 has at `right`, float64; below 1e-36 all is alike."""
    unit = torch.from_numpy(np.spacing(right.float().abs().numpy())).double()
    return ((got.double() - right).abs() - 1e-36).clamp_min(0) / unit


def test_silu_is_within_a_few_units_in_the_last_place(native_kernels: UseKernels) -> None:
    gate = torch.cat((torch.linspace(-104, 104, 40_000), torch.randn(20_000) * 3, torch.randn(1_000) * 1e-6))
    x = torch.stack((gate, torch.ones_like(gate))).reshape(1, -1)
    right = gate.double() / (1 + (-gate.double()).exp())
    assert ulps(ops.silu_and_mul(x)[0], right).max() <= 4


def two_positions(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """The weight of the second of two positions with the scores 0 and scores [N], by attention over both."""
    head_dim = 16
    pool = torch.zeros(2, 1, 2, 1, BLOCK_SIZE, head_dim)
    pool[1, 0, :, 0, 1] = 1.0
    num_rows = len(scores)
    tables, block = [[1]] * num_rows, np.ones(num_rows, np.int64)
    shape = AttentionShape(1, 1, 1, BLOCK_SIZE, head_dim)
    plan = make_plan(shape, [1] * num_rows, [2] * num_rows, tables, block, block)
    q = torch.zeros(num_rows, 1, head_dim)
    q[:, 0, 0] = scores
    return ops.paged_attention(q, pool, 0, plan, AttentionOptions(1.0, soft_cap))[:, 0, 0]


def test_exp_is_within_a_few_units_in_the_last_place(native_kernels: UseKernels) -> None:
    scores = torch.cat((torch.linspace(-87, 20, 20_000), torch.randn(5_000)))
    assert ulps(two_positions(scores, 0.0), scores.double().sigmoid()).max() <= 4


@pytest.mark.parametrize("soft_cap", [1.0, 4.0, 30.0])
def test_a_soft_capped_score_is_within_a_few_units_of_the_cap(native_kernels: UseKernels, soft_cap: float) -> None:
    """tanh is: near 0 it has the digits that it has near 1, and a score needs no more."""
    scores = torch.cat((torch.linspace(-20, 20, 20_000), torch.randn(5_000) * 0.01)) * soft_cap
    scores = scores[scores.abs() < 3]  # where the weight tells the score well
    got = two_positions(scores, soft_cap).double()
    capped = soft_cap * torch.tanh(scores.double() / soft_cap)
    assert ((got.logit() - capped).abs() <= 2**-23 * (2 * soft_cap + 3 * capped.abs().exp())).all()
