"""What the kernels' callers describe: how rows attend, how KV is scaled, which form a weight has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

WeightFormat = Literal["int8", "int4"]
GROUP_SIZES = (32, 64, 128)
_MAX_Q = {"int8": 255, "int4": 15}


@dataclass(frozen=True)
class AttentionOptions:
    """soft_cap: scores become cap * tanh(score / cap); 0: none. window: a row sees itself and window - 1 positions
    before it; 0: all."""

    scale: float
    soft_cap: float = 0.0
    window: int = 0


@dataclass(frozen=True)
class KVScales:
    """float32 [num_layers, num_kv_heads]: what a number of the pool is multiplied by; the same on every node."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class QuantizedWeight:
    """weight[n, k] = scales[n, g] * q[n, k] + offsets[n, g], g the group of input k; without offsets q counts from the
    middle: scales * (q - 128) for int8, scales * (q - 8) for int4.

    q: uint8 [out_features, in_features], below 16 for int4. scales, offsets: [out_features, in_features / group_size],
    float16 numbers; with group_size 0 float32 [out_features, 1], int8 only.
    """

    format: WeightFormat
    q: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        num_out, num_in = self.q.shape
        if self.group_size == 0:
            if self.format != "int8" or self.offsets is not None:
                raise ValueError(f"{self.format} weights without groups are int8 and have no offsets")
        elif self.group_size not in GROUP_SIZES or num_in % self.group_size:
            raise ValueError(f"group_size is {self.group_size}, must be one of {GROUP_SIZES} and divide {num_in}")
        want = (num_out, num_in // (self.group_size or num_in))
        for name, numbers in (("scales", self.scales), ("offsets", self.offsets)):
            if numbers is not None and numbers.shape != want:
                raise ValueError(f"{name} are {tuple(numbers.shape)}, must be {want}")

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def dequantized(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        num_out, num_in = self.q.shape
        q = self.q.float().view(num_out, self.scales.shape[1], -1)
        if self.offsets is None:
            found = (q - (128 if self.format == "int8" else 8)) * self.scales.float()[:, :, None]
        else:
            found = q * self.scales.float()[:, :, None] + self.offsets.float()[:, :, None]
        return found.view(num_out, num_in)


def quantize(weight: torch.Tensor, form: WeightFormat, group_size: int) -> QuantizedWeight:
    """Rounds a weight [out_features, in_features] to the nearest: int8 with group_size 0 symmetrically by channel, else
    each group between its smallest and its largest number."""
    num_out, num_in = weight.shape
    x = weight.float().view(num_out, num_in // (group_size or num_in), -1)
    if group_size == 0:
        scales = x.abs().amax(-1) / 127
        q = x.div(scales.clamp_min(1e-30)[:, :, None]).round_().clamp_(-127, 127).add_(128)
        return QuantizedWeight(form, q.to(torch.uint8).view(num_out, num_in), scales, None, 0)
    smallest, largest = x.amin(-1), x.amax(-1)
    offsets = smallest.half().float()
    scales = ((largest - offsets) / _MAX_Q[form]).half().float()
    q = (x - offsets[:, :, None]).div_(scales.clamp_min(1e-30)[:, :, None]).round_().clamp_(0, _MAX_Q[form])
    return QuantizedWeight(form, q.to(torch.uint8).view(num_out, num_in), scales, offsets, group_size)


class PackedWeight(Protocol):
    """A weight in the order that its implementation likes; made by `ops.pack_weight`."""

    @property
    def num_bytes(self) -> int: ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [N, in_features] -> [N, out_features]."""


@dataclass(frozen=True)
class DecoderLayerParts:
    """A layer of the usual kind: x += out(attention(qkv(norm(x)))), then x += down(silu and mul(gate_up(norm(x)))).

    biases: of qkv, out, gate_up, down.
    """

    number: int
    num_heads: int
    head_dim: int
    eps: float
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    biases: tuple[torch.Tensor | None, ...]
    attention: AttentionOptions
