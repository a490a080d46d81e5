"""The only source of randomness of sampling: numbers that are pure functions of (seed, choice, output index, token id).

Counter-based and in integer arithmetic: the same on every device, whatever else is in the batch, and after preemption,
hand-off and failover. SplitMix64 (Steele, Lea, Flood 2014) makes a key of the first three, two rounds of a 32-bit mixer
with little bias (Wellons 2018, "lowbias32") a number for each token from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_32 = np.uint32(0x9E3779B9)
_MIX_1, _MIX_2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def draw_key(seed: int, choice: int, output_index: int) -> int:
    """64 bits that stand for one output."""
    state = _mix((seed & _MASK) + _GOLDEN)
    state = _mix(state ^ (choice + 1) * _GOLDEN & _MASK)
    return _mix(state ^ (output_index + 1) * _GOLDEN & _MASK)


def exponentials(keys: Sequence[int], token_ids: torch.Tensor | int) -> torch.Tensor:
    """Exponentially distributed numbers with mean 1, one for each row and token: float32 [len(keys), n], above 0.

    token_ids: int64 [len(keys), n], or a number n for the tokens 0 to n - 1.
    """
    counters = _counter_rows(token_ids, len(keys))
    numbers = torch.empty(len(keys), len(counters[0]))
    for key, row, counter in zip(keys, numbers, counters, strict=True):  # one by one they stay in the cache
        row.numpy()[:] = _mix_32(_mix_32(counter + np.uint32(key & 0xFFFFFFFF)) ^ np.uint32(key >> 32))
        row.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()  # uniform numbers are exact near 0, where it matters
    return numbers


def _counter_rows(token_ids: torch.Tensor | int, num_rows: int) -> list[np.ndarray]:
    if isinstance(token_ids, int):
        return [_counters(token_ids)] * num_rows
    return list(_scatter(token_ids.numpy()))


@lru_cache(maxsize=4)
def _counters(num_tokens: int) -> np.ndarray:
    return _scatter(np.arange(num_tokens))


def _scatter(token_ids: np.ndarray) -> np.ndarray:
    return token_ids.astype(np.uint32) * _GOLDEN_32


def _mix_32(bits: np.ndarray) -> np.ndarray:
    """In place."""
    shifted = bits >> 16
    bits ^= shifted
    bits *= _MIX_1
    bits ^= np.right_shift(bits, 15, out=shifted)
    bits *= _MIX_2
    bits ^= np.right_shift(bits, 16, out=shifted)
    return bits


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
