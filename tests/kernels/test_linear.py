"""Products with packed weights of every format: against float64, with the rounding of activations that each documents.

Not exact: activations are rounded to bfloat16 where the CPU multiplies pairs of them, and to int8 in groups (of the
weight, or of 64 inputs) with the scale max|x| / 127 beside int8 and int4 weights. Exact: they stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import dispatch, ops
from kernels.cpu import native
from kernels.types import GROUP_SIZES, QuantizedWeight, quantize
from tests.kernels.conftest import UseKernels

any_kernels = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHANNEL_GROUP = 64


@dataclass(frozen=True)
class Form:
    """group_size: 0 by channel. has_offsets: of groups only."""

    format: str
    group_size: int = 0
    has_offsets: bool = False

    def make(self, num_out: int, num_in: int) -> torch.Tensor | QuantizedWeight:
        weight = torch.randn(num_out, num_in)
        if self.format == "float32" or self.format == "bfloat16":
            return weight.to(getattr(torch, self.format))
        if self.group_size == 0 or self.has_offsets:
            return quantize(weight, self.format, self.group_size)
        q = torch.randint(0, 256 if self.format == "int8" else 16, (num_out, num_in), dtype=torch.uint8)
        scales = torch.randn(num_out, num_in // self.group_size).half()  # of either sign, as Q4_0 has them
        return QuantizedWeight(self.format, q, scales, None, self.group_size)


FORMS = [
    Form("float32"),
    Form("bfloat16"),
    Form("int8"),
    *(Form(kind, size, has) for kind in ("int8", "int4") for size in GROUP_SIZES for has in (False, True)),
]


def size_of(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """How large the terms are that a weight's numbers are made of: what rounding errors are measured by."""
    if isinstance(weight, torch.Tensor):
        return weight.double().abs()
    q, groups = weight.q.double(), weight.scales.shape[1]
    if weight.offsets is None:
        q = (q - (128 if weight.format == "int8" else 8)).abs()
    scaled = q.view(q.shape[0], groups, -1) * weight.scales.double().abs()[:, :, None]
    if weight.offsets is not None:
        scaled += weight.offsets.double().abs()[:, :, None]
    return scaled.view(q.shape)


def as_multiplied(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, is_exact: bool) -> torch.Tensor:
    """Activations as the kernels round them, float64."""
    if is_exact or dispatch.cpu_choice().name == dispatch.REFERENCE:
        return x.double()
    if isinstance(weight, torch.Tensor):
        has_pairs = weight.dtype == torch.bfloat16 and native.machine().has_bfloat16
        return (x.bfloat16() if has_pairs else x).double()
    rounded = np.zeros(x.shape)
    group = weight.group_size or CHANNEL_GROUP
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group].numpy()
        largest = np.abs(part).max(1, keepdims=True, initial=0)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        rounded[:, first : first + group] = np.rint(part * inverse) * (largest / np.float32(127)).astype(np.float64)
    return torch.from_numpy(rounded)


def check(form: Form, num_out: int, num_in: int, num_rows: int, has_bias: bool, is_exact: bool) -> None:
    weight, x = form.make(num_out, num_in), torch.randn(num_rows, num_in)
    if dispatch.cpu_choice().name == dispatch.REFERENCE and isinstance(weight, torch.Tensor):
        weight = weight.float()  # plain torch multiplies bfloat16 by bfloat16 only
    bias = torch.randn(num_out) if has_bias else None
    got = ops.linear(x, ops.pack_weight(weight), bias)
    values = (weight if isinstance(weight, torch.Tensor) else weight.dequantized()).double()
    right = as_multiplied(x, weight, is_exact) @ values.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ size_of(weight).T + (0 if bias is None else bias.double().abs())
    assert got.shape == (num_rows, num_out)
    assert ((got.double() - right).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(any_kernels, max_examples=8)
@given(num_out=st.integers(1, 100), num_in=st.integers(1, 300), num_rows=st.integers(0, 40), has_bias=st.booleans())
def test_equals_float64(
    kernels: UseKernels, form: Form, is_exact: bool, num_out: int, num_in: int, num_rows: int, has_bias: bool
) -> None:
    kernels(is_exact=is_exact)
    num_in = -(-num_in // (form.group_size or 1)) * (form.group_size or 1)
    torch.manual_seed(num_in * 1000 + num_out)
    check(form, num_out, num_in, num_rows, has_bias, is_exact)


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equals_float64_over_larger_shapes(kernels: UseKernels, form: Form, is_exact: bool) -> None:
    """More rows than one pass packs (448), more weights than one tile of work has."""
    kernels(is_exact=is_exact)
    for num_rows in (1, 6, 14, 15, 60, 113, 447, 448, 449, 900):
        for num_out, num_in in ((33, 128), (200, 1024), (1030, 384)):
            check(form, num_out, num_in, num_rows, True, is_exact)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(
    native_kernels: UseKernels, form: Form, is_exact: bool
) -> None:
    torch.manual_seed(2)
    weight, bias, x = form.make(150, 256), torch.randn(150), torch.randn(460, 256)
    whole = []
    for num_threads in (1, 2, 3):
        native_kernels(num_threads, is_exact)
        packed = ops.pack_weight(weight)
        whole.append(ops.linear(x, packed, bias))
        for first, count in (
            (0, 1),
            (459, 1),
            (7, 2),
            (20, 5),
            (3, 6),
            (11, 7),
            (100, 13),
            (40, 14),
            (41, 15),
            (0, 65),
        ):
            some = ops.linear(x[first : first + count], packed, bias)
            assert torch.equal(some, whole[-1][first : first + count]), f"rows {first} and {count - 1} more"
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(whole[0], whole[2])


@pytest.mark.parametrize("form", [Form("int8"), Form("int8", 32), Form("int4", 32), Form("int4", 128, True)], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-40, 3e-38, 1e-30, 1e30])
def test_activations_of_any_size_round_to_int8(native_kernels: UseKernels, form: Form, size: float) -> None:
    """Smaller than what 127 can be divided by (those may count as 0), and so large that their sums near infinity."""
    torch.manual_seed(3)
    weight, x = form.make(20, 256), torch.randn(3, 256) * size
    got = ops.linear(x, ops.pack_weight(weight))
    right = x.double() @ (weight.dequantized().double()).T
    size_of_terms = x.double().abs() @ size_of(weight).T
    assert ((got.double() - right).abs() <= 0.02 * size_of_terms + 1e-32).all()
    assert size == 0 or size < 1e-30 or got.any()


def test_one_group_of_inputs_does_not_round_another(native_kernels: UseKernels) -> None:
    """A large activation costs the digits of its own group only: here one whose weights are all 0 (stored as 128)."""
    weight = quantize(torch.randn(8, 256), "int8", 0)
    weight.q[:, :CHANNEL_GROUP] = 128
    x = torch.randn(2, 256)
    x[:, 7] = 1e6
    got = ops.linear(x, ops.pack_weight(weight)).double()
    torch.testing.assert_close(got, x.double() @ weight.dequantized().double().T, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_in_half_precision(kernels: UseKernels, dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 64).to(dtype), torch.randn(3, 64).to(dtype)
    got = ops.linear(x, ops.pack_weight(weight))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)


def test_a_bias_in_the_weights_dtype_is_added(native_kernels: UseKernels) -> None:
    weight, x, bias = torch.randn(40, 30).bfloat16(), torch.randn(3, 30), torch.randn(40).bfloat16()
    packed = ops.pack_weight(weight)
    assert torch.equal(ops.linear(x, packed, bias), ops.linear(x, packed) + bias.float())


# --- quantised weights ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from([Form("int8"), *(Form(f, g, True) for f in ("int8", "int4") for g in GROUP_SIZES)]),
    num_out=st.integers(1, 9),
    num_groups=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_quantising_rounds_to_the_nearest(form: Form, num_out: int, num_groups: int, seed: int) -> None:
    weight = torch.randn(num_out, num_groups * (form.group_size or 50), generator=torch.Generator().manual_seed(seed))
    found = form_of(weight, form)
    step = found.scales.float().repeat_interleave(weight.shape[1] // found.scales.shape[1], 1)
    # half a step, and what rounding scale and offset to float16 moves the ends of a group by
    slack = 0.5 if form.group_size == 0 else 0.5 + 0.6 * (1 if form.format == "int8" else 0.1)
    assert ((found.dequantized() - weight).abs() <= slack * step + 1e-6).all()


def form_of(weight: torch.Tensor, form: Form) -> QuantizedWeight:
    return quantize(weight, form.format, form.group_size)


@pytest.mark.parametrize("form", [Form("int8"), Form("int4", 32, True)], ids=str)
def test_weights_of_nothing_but_one_number_are_kept(form: Form) -> None:
    for number in (0.0, 1.0, -2.5):
        found = form_of(torch.full((3, 64), number), form).dequantized()
        torch.testing.assert_close(found, torch.full((3, 64), number))


def test_groups_that_do_not_fit_are_refused() -> None:
    q, scales = torch.zeros(4, 96, dtype=torch.uint8), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"group_size is 64, must be one of \(32, 64, 128\) and divide 96"):
        QuantizedWeight("int4", q, scales, None, 64)
    with pytest.raises(ValueError, match=r"offsets are \(4, 2\), must be \(4, 3\)"):
        QuantizedWeight("int4", q, scales, torch.zeros(4, 2), 32)
    with pytest.raises(ValueError, match="int4 weights without groups are int8"):
        QuantizedWeight("int4", q, torch.zeros(4, 1), None, 0)
