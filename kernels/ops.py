"""The one public surface of the kernels: typed, shapes checked, independent of what serves it.

Batches are flat: row i of every tensor belongs to token i of the step, whichever request it is of. The pool is
`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; block 0 takes writes that nobody reads.
"""

from __future__ import annotations

import torch

from kernels.dispatch import implementation
from kernels.plan import AttentionPlan

__all__ = [
    "copy_blocks",
    "fused_add_rms_norm",
    "linear",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]


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


def write_kv(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan) -> None:
    """k, v [N, num_kv_heads, head_dim] into the slots of this layer that the plan names."""
    _check(k.shape == v.shape == (plan.num_rows, pool.shape[3], pool.shape[5]), "write_kv", k, v, pool)
    implementation("write_kv", k.device.type)(k, v, pool, layer, plan)


def paged_attention(q: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Causal attention of q [N, num_heads, head_dim] over the pool, as the plan says; [N, num_heads, head_dim].

    Rows with one query and rows of prompt chunks stand in one call; num_heads is a multiple of num_kv_heads. No slot
    past a sequence's end is read. The result may be a buffer that the next call overwrites.
    """
    _check(q.shape == plan.query.shape and q.shape[1] % pool.shape[3] == 0, "paged_attention", q, plan.query, pool)
    out: torch.Tensor = implementation("paged_attention", q.device.type)(q, pool, layer, plan, scale)
    return out


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


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [out_features, in_features] in the order that `linear` likes best on its device; opaque."""
    packed: torch.Tensor = implementation("pack_weight", weight.device.type)(weight)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, in_features] times a packed weight, [N, out_features]."""
    out: torch.Tensor = implementation("linear", x.device.type)(x, weight, bias)
    return out


def _check(is_right: bool, op: str, *tensors: torch.Tensor) -> None:
    if not is_right:
        raise ValueError(f"{op}: shapes do not fit: {', '.join(str(tuple(t.shape)) for t in tensors)}")
