"""Rotary position embedding: the tables of cosines and sines for every variant that a config can name.

Sources: RoFormer (arXiv 2104.09864); linear and NTK-dynamic scaling, YaRN (arXiv 2309.00071), llama3 and longrope as
the models' own configs define them, in Hugging Face's meaning of the keys. An unknown type is an error, not a guess.
Where a variant depends on the length (dynamic, longrope), it is the longest length served, not that of the moment: the
KV of a prefix must not depend on what follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.errors import CheckpointError
from common.model_config import ModelConfig, RopeConfig

Frequencies = tuple[torch.Tensor, float]
"""Inverse frequencies [head_dim / 2] and the factor that cos and sin are multiplied by."""


class RotaryEmbedding:
    """cos and sin for positions 0 .. max_positions - 1, float32 [max_positions, head_dim / 2]."""

    def __init__(self, config: ModelConfig, max_positions: int | None = None) -> None:
        rope = config.rope
        num_positions = max_positions or config.max_position_embeddings
        inverse, factor = frequencies(rope, config.head_dim, config.max_position_embeddings, num_positions)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
        self.cos = angles.cos() * factor
        self.sin = angles.sin() * factor

    def rows(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row's position for `ops.rotary_embedding`, [N, head_dim]."""
        cos = self.cos.index_select(0, positions).to(dtype)
        sin = self.sin.index_select(0, positions).to(dtype)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def frequencies(rope: RopeConfig, dim: int, max_position_embeddings: int, num_positions: int) -> Frequencies:
    """num_positions decides what depends on the length served (dynamic, longrope). Raises CheckpointError."""
    compute = _VARIANTS.get(rope.type)
    if compute is None:
        raise CheckpointError(f"rope type {rope.type!r} is not supported, there are {sorted(_VARIANTS)}")
    try:
        return compute(rope.theta, rope.parameters, dim, max_position_embeddings, num_positions)
    except KeyError as error:
        raise CheckpointError(f"rope type {rope.type!r} needs {error.args[0]!r} in the model's config") from None


def _inverse(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(theta: float, _p: Mapping[str, Any], dim: int, _max: int, _n: int) -> Frequencies:
    return _inverse(theta, dim), 1.0


def _linear(theta: float, p: Mapping[str, Any], dim: int, _max: int, _n: int) -> Frequencies:
    return _inverse(theta, dim) / p["factor"], 1.0


def _dynamic(theta: float, p: Mapping[str, Any], dim: int, max_length: int, num_positions: int) -> Frequencies:
    length = max(num_positions, max_length)
    base = theta * ((p["factor"] * length / max_length) - (p["factor"] - 1)) ** (dim / (dim - 2))
    return _inverse(base, dim), 1.0


def _llama3(theta: float, p: Mapping[str, Any], dim: int, _max: int, _n: int) -> Frequencies:
    inverse, original = _inverse(theta, dim), p["original_max_position_embeddings"]
    low, high, factor = p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, between, scaled), 1.0


def _yarn(theta: float, p: Mapping[str, Any], dim: int, max_length: int, _n: int) -> Frequencies:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_length / original

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(p.get("beta_fast") or 32), correction_dim(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    inverse = _inverse(theta, dim)
    return inverse / factor * ramp + inverse * (1 - ramp), _yarn_factor(p, factor)


def _yarn_factor(p: Mapping[str, Any], factor: float) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(factor, p["mscale"]) / mscale(factor, p["mscale_all_dim"])
    return mscale(factor)


def _longrope(theta: float, p: Mapping[str, Any], dim: int, max_length: int, num_positions: int) -> Frequencies:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_length / original
    name = "long_factor" if num_positions > original else "short_factor"
    if len(p[name]) != dim // 2:
        raise CheckpointError(f"rope type 'longrope': {name} has {len(p[name])} numbers, must have {dim // 2}")
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _inverse(theta, dim) / torch.tensor(p[name], dtype=torch.float32), float(attention)


_VARIANTS: dict[str, Callable[[float, Mapping[str, Any], int, int, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
