"""Plain torch kernels: what other backends are compared with, and what serves where there is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves_swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(halves_swapped.mul_(sin.unsqueeze(1)), x, cos.unsqueeze(1))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Block by block: each is one contiguous piece, and gathering them first would copy everything twice."""
    for from_block, to_block in pairs.tolist():
        target[to_block].copy_(source[from_block])


def want_huge_pages(_memory: torch.Tensor) -> None:
    """torch has no say in this."""


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A stable sort: of equal numbers the lower index comes first. NaN counts as the lowest."""
    known = torch.where(x.isnan(), float("-inf"), x)
    values, ids = known.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), ids[:, :k].contiguous()
