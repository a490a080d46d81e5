"""A whole decoder layer in one call of the compiled kernels: the same kernels, no Python between them."""

from __future__ import annotations

import torch

from kernels.cpu import _native
from kernels.cpu.ops import MAX_HEAD_DIM, NativeWeight, describe_pool, rows_of
from kernels.plan import AttentionPlan
from kernels.types import DecoderLayerParts


class NativeLayer:
    """parts: kept, since `layer` points into their tensors."""

    def __init__(self, parts: DecoderLayerParts, machine: _native.Machine, layer: _native.Layer) -> None:
        self._parts = parts
        self._machine = machine
        self._layer = layer

    def __call__(
        self,
        residual: torch.Tensor,
        pool: torch.Tensor,
        plan: AttentionPlan,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """residual: float32 [N, hidden_size], changed in place. cos, sin: float32 [N, head_dim]. All contiguous."""
        for rows in (residual, cos, sin):
            if rows.dtype != torch.float32 or not rows.is_contiguous() or rows.shape[0] != plan.num_rows:
                raise ValueError(
                    f"a layer wants {plan.num_rows} contiguous rows of float32, not {rows.shape} {rows.dtype}"
                )
        described = describe_pool(pool, None)
        self._machine.layer(self._layer, described, rows_of(plan), cos.data_ptr(), sin.data_ptr(), residual.data_ptr())


def fuse_layer(parts: DecoderLayerParts) -> NativeLayer | None:
    """None when these parts cannot be fused, so that the ops have to be called one by one."""
    weights = [w for w in (parts.qkv, parts.out, parts.gate_up, parts.down) if isinstance(w, NativeWeight)]
    tensors = (parts.input_norm, parts.post_norm, *(bias for bias in parts.biases if bias is not None))
    if len(weights) < 4 or parts.head_dim > MAX_HEAD_DIM:
        return None
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in tensors):
        return None
    qkv, out, gate_up, down = weights
    options = parts.attention
    layer = _native.Layer(
        parts.number,
        down.out_features,
        down.in_features,
        parts.eps,
        parts.input_norm.data_ptr(),
        parts.post_norm.data_ptr(),
        qkv.packed,
        out.packed,
        gate_up.packed,
        down.packed,
        [0 if bias is None else bias.data_ptr() for bias in parts.biases],
        _native.AttentionOptions(parts.num_heads, options.scale, options.soft_cap, options.window),
    )
    return NativeLayer(parts, qkv.machine, layer)
