"""The one public surface of the kernels: typed, shapes checked, independent of what serves it.

Batches are flat: row i of every tensor belongs to token i of the step, whichever request it is of. The pool is
`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; block 0 takes writes that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.dispatch import REFERENCE, cpu_choice, has, implementation
from kernels.plan import AttentionPlan
from kernels.types import AttentionOptions, DecoderLayerParts, KVScales, PackedWeight, QuantizedWeight

__all__ = [
    "AttentionOptions",
    "DecoderLayerParts",
    "FusedLayer",
    "KVScales",
    "PackedWeight",
    "QuantizedWeight",
    "activation_dtype",
    "copy_blocks",
    "fuse_layer",
    "fused_add_rms_norm",
    "linear",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "top_k",
    "want_huge_pages",
    "write_kv",
]

FusedLayer = Callable[[torch.Tensor, torch.Tensor, AttentionPlan, torch.Tensor, torch.Tensor], None]
"""(residual, pool, plan, cos, sin): a whole layer; the residual, float32 [N, hidden_size], is changed in place."""


def activation_dtype(weights: torch.dtype, device_type: str = "cpu") -> torch.dtype:
    """What rows are computed in where weights are of this dtype: the compiled kernels keep float32."""
    return weights if device_type != "cpu" or cpu_choice().name == REFERENCE else torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, D] / rms(x) * weight [D]."""
    _check(x.shape[-1] == weight.shape[0], "rms_norm", x, weight)
    out: torch.Tensor = implementation("rms_norm", x.device.type)(x, weight, eps)
    return out


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [N, D] += x [N, D], in place; returns rms_norm(residual, weight, eps)."""
    _check(x.shape == residual.shape and x.shape[-1] == weight.shape[0], "fused_add_rms_norm", x, residual, weight)
    out: torch.Tensor = implementation("fused_add_rms_norm", x.device.type)(x, residual, weight, eps)
    return out


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [N, heads, head_dim] rotated by each row's angles; pairs are (i, i + head_dim / 2), as in Hugging Face's Llama.

    cos, sin: [N, head_dim], each angle in both halves, the first half of `sin` negated (`RotaryEmbedding.rows`): the
    result is x * cos + (x with its halves swapped) * sin.
    """
    _check(x.dim() == 3 and cos.shape == sin.shape == (x.shape[0], x.shape[2]), "rotary_embedding", x, cos, sin)
    out: torch.Tensor = implementation("rotary_embedding", x.device.type)(x, cos, sin)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [N, 2 * D] -> silu(x[:, :D]) * x[:, D:]."""
    _check(x.shape[-1] % 2 == 0, "silu_and_mul", x)
    out: torch.Tensor = implementation("silu_and_mul", x.device.type)(x)
    return out


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scales: KVScales | None = None,
) -> None:
    """k, v [N, num_kv_heads, head_dim] into the slots of this layer that the plan names, divided by their scales."""
    _check(k.shape == v.shape == (plan.num_rows, pool.shape[3], pool.shape[5]), "write_kv", k, v, pool)
    implementation("write_kv", k.device.type)(k, v, pool, layer, plan, scales)


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    options: AttentionOptions,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Causal attention of q [N, num_heads, head_dim] over the pool, as the plan says; [N, num_heads, head_dim].

    Rows with one query and rows of prompt chunks stand in one call; num_heads is a multiple of num_kv_heads. No slot
    past a sequence's end is read.
    """
    is_right = q.dim() == 3 and q.shape[::2] == (plan.num_rows, pool.shape[5]) and q.shape[1] % pool.shape[3] == 0
    _check(is_right, "paged_attention", q, pool)
    out: torch.Tensor = implementation("paged_attention", q.device.type)(q, pool, layer, plan, options, scales)
    return out


def want_huge_pages(memory: torch.Tensor) -> None:
    """Asks the system to back this memory with huge pages when it is first touched; does nothing where it cannot."""
    implementation("want_huge_pages", memory.device.type)(memory)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Whole blocks, all layers: target[pairs[i, 1]] = source[pairs[i, 0]] for pairs int64 [N, 2], in this order: within
    one pool a block may be read before it is written, and never after."""
    _check(
        pairs.dim() == 2 and pairs.shape[1] == 2 and source.shape[1:] == target.shape[1:],
        "copy_blocks",
        source,
        target,
        pairs,
    )
    implementation("copy_blocks", target.device.type)(source, target, pairs)


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [N, D], largest first, of equal ones the lower index first, and their indexes
    (int64); [N, k] each. NaN counts as the lowest."""
    _check(x.dim() == 2 and 0 < k <= x.shape[1], f"top_k of {k}", x)
    found: tuple[torch.Tensor, torch.Tensor] = implementation("top_k", x.device.type)(x, k)
    return found


def pack_weight(weight: torch.Tensor | QuantizedWeight, device_type: str = "cpu") -> PackedWeight:
    """weight [out_features, in_features] in the order that its device's kernels like best."""
    packed: PackedWeight = implementation("pack_weight", device_type)(weight)
    return packed


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, in_features] times a packed weight, [N, out_features]."""
    return weight.multiply(x, bias)


def fuse_layer(parts: DecoderLayerParts, device_type: str = "cpu") -> FusedLayer | None:
    """The whole layer as one call, or None where the kernels have none for these parts."""
    if not has("fuse_layer", device_type):
        return None
    fused: FusedLayer | None = implementation("fuse_layer", device_type)(parts)
    return fused


def _check(is_right: bool, op: str, *tensors: torch.Tensor) -> None:
    if not is_right:
        raise ValueError(f"{op}: shapes do not fit: {', '.join(str(tuple(t.shape)) for t in tensors)}")
