"""The ops as the compiled kernels compute them: tensors become addresses. Activations are float32.

Whatever comes in another dtype is computed in float32 and given back in its own. Shapes were checked by kernels.ops.
"""

from __future__ import annotations

import torch

from kernels.cpu import _native, native
from kernels.plan import AttentionPlan
from kernels.types import AttentionOptions, KVScales, QuantizedWeight

_KV_TYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.int8: "int8",
}
MAX_HEAD_DIM = 256


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, scale = _floats(x), _floats(weight)
    out = torch.empty_like(rows)
    size = rows.shape[-1]
    native.machine().rms_norm(_at(rows), _at(scale), eps, rows.numel() // size, size, _at(out))
    return out.to(x.dtype)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if residual.dtype != torch.float32 or not residual.is_contiguous():
        return rms_norm(residual.add_(x), weight, eps)
    rows, scale = _floats(x), _floats(weight)
    out = torch.empty_like(residual)
    size = rows.shape[-1]
    native.machine().add_rms_norm(_at(rows), _at(residual), _at(scale), eps, rows.numel() // size, size, _at(out))
    return out.to(x.dtype)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rows, row_stride = _rows_of_heads(x)
    num_rows, num_heads, head_dim = x.shape
    out = torch.empty(x.shape)
    cos, sin = _floats(cos), _floats(sin)
    native.machine().rotary(_at(rows), row_stride, _at(cos), _at(sin), num_rows, num_heads, head_dim, _at(out))
    return out.to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    rows = _floats(x)
    size = rows.shape[-1] // 2
    out = torch.empty(*rows.shape[:-1], size)
    native.machine().silu_and_mul(_at(rows), out.numel() // size if size else 0, size, _at(out))
    return out.to(x.dtype)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scales: KVScales | None
) -> None:
    (key, key_stride), (value, value_stride) = _rows_of_heads(k), _rows_of_heads(v)
    native.machine().write_kv(
        _at(key), key_stride, _at(value), value_stride, describe_pool(pool, scales), layer, rows_of(plan)
    )


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    options: AttentionOptions,
    scales: KVScales | None,
) -> torch.Tensor:
    query, stride = _rows_of_heads(q)
    out = torch.empty(q.shape)
    native.machine().attention(
        _at(query),
        stride,
        describe_pool(pool, scales),
        layer,
        rows_of(plan),
        _native.AttentionOptions(q.shape[1], options.scale, options.soft_cap, options.window),
        _at(out),
    )
    return out.to(q.dtype)


def want_huge_pages(memory: torch.Tensor) -> None:
    _native.advise_huge_pages(_at(memory), memory.numel() * memory.element_size())


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _floats(x)
    num_rows, size = rows.shape
    values, ids = torch.empty(num_rows, k), torch.empty(num_rows, k, dtype=torch.int64)
    native.machine().top_k(_at(rows), num_rows, size, k, _at(values), _at(ids))
    return values, ids


class NativeWeight:
    """A weight in panels, in memory of its own, on huge pages where it is large."""

    def __init__(self, machine: _native.Machine, packed: _native.Weight, shape: torch.Size) -> None:
        self.machine = machine
        self.packed = packed
        self.out_features, self.in_features = shape

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = _floats(x)
        out = torch.empty(rows.shape[0], self.out_features)
        bias = None if bias is None else _floats(bias)
        self.machine.linear(self.packed, 0 if bias is None else _at(bias), _at(rows), rows.shape[0], _at(out))
        return out.to(x.dtype)


def pack_weight(weight: torch.Tensor | QuantizedWeight) -> NativeWeight:
    """float16 becomes float32: the kernels have no products of float16."""
    machine = native.machine()
    formats = _native.Format
    form: str
    if isinstance(weight, QuantizedWeight):
        form, values, group_size = weight.format, weight.q.contiguous(), weight.group_size
        scales = weight.scales.float().contiguous()
        offsets = None if weight.offsets is None else weight.offsets.float().contiguous()
    else:
        values = weight.contiguous() if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
        form, group_size, scales, offsets = str(values.dtype).removeprefix("torch."), 0, None, None
    num_out, num_in = values.shape
    packed = machine.pack(
        getattr(formats, form),
        num_out,
        num_in,
        group_size,
        native.is_exact(),
        _at(values),
        0 if scales is None else _at(scales),
        0 if offsets is None else _at(offsets),
    )
    return NativeWeight(machine, packed, values.shape)


# --- tensors as the kernels see them ---------------------------------------------------------------------------------


def rows_of(plan: AttentionPlan) -> _native.Rows:
    return plan.once(_make_rows)


def _make_rows(plan: AttentionPlan) -> _native.Rows:
    return _native.Rows(
        plan.first_rows, plan.contexts, plan.first_blocks, plan.block_ids, plan.write_blocks, plan.write_offsets
    )


def describe_pool(pool: torch.Tensor, scales: KVScales | None) -> _native.Pool:
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, the compiled kernels have up to {MAX_HEAD_DIM}")
    types = _native.KVType
    return _native.Pool(
        _at(pool),
        getattr(types, _KV_TYPES[pool.dtype]),
        num_layers,
        num_kv_heads,
        block_size,
        head_dim,
        0 if scales is None else _at(scales.key),
        0 if scales is None else _at(scales.value),
    )


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


def _rows_of_heads(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [N, heads, head_dim] in float32 with heads side by side, and the distance from row to row."""
    x = x.to(torch.float32)
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    return x, x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def _at(x: torch.Tensor) -> int:
    return x.data_ptr()
