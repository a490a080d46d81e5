"""Linear layers whose weights come from a loader, part by part, and are put into the kernels' own order.

A layer packs itself as soon as it has its last part, and then holds only what was packed: a model that is being loaded
takes the memory of its packed weights and of one layer. A norm, bias or embedding is NaN until it is filled, so that a
tensor nobody loaded cannot pass for weights. Knows no checkpoint and no names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv_layout import Quantization
from kernels import ops
from kernels.types import quantize

QUANTIZED_GROUP = 32
Weight = torch.Tensor | ops.QuantizedWeight


@dataclass(frozen=True)
class WeightForm:
    """What a model's matrices become: floats of `dtype`, or int8 or int4 made of floats when they are loaded. A matrix
    that comes quantised stays so."""

    dtype: torch.dtype
    quantization: Quantization = "none"

    @property
    def activations(self) -> torch.dtype:
        return ops.activation_dtype(self.dtype)

    def of(self, weight: Weight) -> Weight:
        """Raises ValueError where the matrix cannot be divided into groups."""
        if isinstance(weight, ops.QuantizedWeight) or self.quantization in ("none", "gguf"):
            return weight
        if self.quantization == "int8":
            return quantize(weight, "int8", 0)
        if weight.shape[1] % QUANTIZED_GROUP:
            raise ValueError(
                f"has {weight.shape[1]} inputs, --quantization int4 needs a multiple of {QUANTIZED_GROUP};"
                " int8 takes any number"
            )
        return quantize(weight, "int4", QUANTIZED_GROUP)


class Parameter:
    """One tensor of a layer and how a checkpoint's tensors get into it: whole, or rows first_row .. of it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.data = torch.full(shape, math.nan, dtype=dtype)

    def load(self, tensor: Weight, first_row: int = 0, num_rows: int | None = None) -> None:
        """Raises ValueError when the tensor's shape is not the one wanted."""
        if isinstance(tensor, ops.QuantizedWeight):
            tensor = tensor.dequantized()
        target = self.data[first_row : first_row + num_rows] if num_rows is not None else self.data
        if target.shape != tensor.shape:
            raise ValueError(f"has shape {tuple(tensor.shape)}, must have {tuple(target.shape)}")
        target.copy_(tensor)

    @property
    def is_filled(self) -> bool:
        return not bool(torch.isnan(self.data).any())


class Linear:
    """x [N, in_features] -> [N, sum of out_features]; several checkpoint tensors may stand on top of each other.

    format: float32, int4, ...: what was packed; empty before.
    """

    def __init__(self, in_features: int, out_features: list[int], *, has_bias: bool, form: WeightForm) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.bias = Parameter((sum(out_features),), form.activations) if has_bias else None
        self.packed: ops.PackedWeight | None = None
        self.format = ""
        self._form = form
        self._parts: dict[int, Weight] = {}

    def load_weight(self, weight: Weight, part: int = 0) -> None:
        """Raises ValueError when it is not the weight wanted."""
        wanted = (self.out_features[part], self.in_features)
        if weight.shape != wanted:
            raise ValueError(f"has shape {tuple(weight.shape)}, must have {wanted}")
        if isinstance(weight, torch.Tensor) and torch.isnan(weight).any():
            raise ValueError("holds NaN, which is no weight")
        self._parts[part] = self._form.of(weight)
        if len(self._parts) == len(self.out_features):
            self._pack([self._parts[number] for number in range(len(self.out_features))])
            self._parts.clear()

    def load_bias(self, tensor: Weight, part: int = 0) -> None:
        assert self.bias is not None
        self.bias.load(tensor, sum(self.out_features[:part]), self.out_features[part])

    @property
    def missing_parts(self) -> list[int]:
        return [] if self.packed else [part for part in range(len(self.out_features)) if part not in self._parts]

    @property
    def missing_biases(self) -> list[int]:
        pieces = [] if self.bias is None else self.bias.data.split(self.out_features)
        return [part for part, piece in enumerate(pieces) if torch.isnan(piece).any()]

    def _pack(self, parts: list[Weight]) -> None:
        stacked = stack(parts, self._form.dtype)
        self.packed = ops.pack_weight(stacked)
        if isinstance(stacked, ops.QuantizedWeight):
            self.format = stacked.format
        else:
            self.format = str(stacked.dtype).removeprefix("torch.")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return ops.linear(x, self.packed, None if self.bias is None else self.bias.data)


def stack(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """All rows as one weight: quantised where every part is, and in the same way, else floats of this dtype."""
    quantized = [part for part in parts if isinstance(part, ops.QuantizedWeight)]
    ways = {(part.format, part.group_size, part.offsets is None) for part in quantized}
    if len(quantized) < len(parts) or len(ways) > 1:
        floats = [part if isinstance(part, torch.Tensor) else part.dequantized() for part in parts]
        return torch.cat([part.to(dtype) for part in floats])
    offsets = [part.offsets for part in quantized if part.offsets is not None]
    return ops.QuantizedWeight(
        quantized[0].format,
        torch.cat([part.q for part in quantized]),
        torch.cat([part.scales for part in quantized]),
        torch.cat(offsets) if offsets else None,
        quantized[0].group_size,
    )
