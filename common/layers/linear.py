"""Linear layers whose weights are filled by a loader, shard by shard, and then put into the kernels' own order.

A parameter is NaN until it is filled, so that a tensor nobody loaded cannot pass for weights.
"""

from __future__ import annotations

import math

import torch

from kernels import ops


class Parameter:
    """One tensor of a layer and how a checkpoint's tensors get into it: whole, or rows first_row .. of it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.data = torch.full(shape, math.nan, dtype=dtype)

    def load(self, tensor: torch.Tensor, first_row: int = 0, num_rows: int | None = None) -> None:
        """Raises ValueError when the tensor's shape is not the one wanted."""
        target = self.data[first_row : first_row + num_rows] if num_rows is not None else self.data
        if target.shape != tensor.shape:
            raise ValueError(f"has shape {tuple(tensor.shape)}, must have {tuple(target.shape)}")
        target.copy_(tensor)

    @property
    def is_filled(self) -> bool:
        return not bool(torch.isnan(self.data).any())


class Linear:
    """x [N, in_features] -> [N, sum of out_features]; several checkpoint tensors may stand on top of each other."""

    def __init__(self, in_features: int, out_features: list[int], *, has_bias: bool, dtype: torch.dtype) -> None:
        self.out_features = out_features
        self.weight = Parameter((sum(out_features), in_features), dtype)
        self.bias = Parameter((sum(out_features),), ops.activation_dtype(dtype)) if has_bias else None
        self.packed: ops.PackedWeight | None = None

    def load_weight(self, tensor: torch.Tensor, part: int = 0) -> None:
        self.weight.load(tensor, sum(self.out_features[:part]), self.out_features[part])

    def load_bias(self, tensor: torch.Tensor, part: int = 0) -> None:
        assert self.bias is not None
        self.bias.load(tensor, sum(self.out_features[:part]), self.out_features[part])

    def pack(self) -> None:
        """After loading: only the packed weight stays."""
        self.packed = ops.pack_weight(self.weight.data)
        self.weight.data = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return ops.linear(x, self.packed, None if self.bias is None else self.bias.data)
