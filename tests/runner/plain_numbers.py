"""The sampler's random numbers, one token after the other in Python's integers: what the vectorised ones must equal."""

from __future__ import annotations

import math

from common.runner.random_numbers import draw_key
from common.runner.sampler import SamplingRow


def plain_mix(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def plain_exponentials(row: SamplingRow, num_tokens: int) -> list[float]:
    key = draw_key(row.params.seed or 0, row.choice, row.output_index)
    low, high = key & 0xFFFFFFFF, key >> 32
    numbers = [plain_mix(plain_mix(i * 0x9E3779B9 + low & 0xFFFFFFFF) ^ high) for i in range(num_tokens)]
    return [-math.log1p(-min((number + 0.5) / 2**32, 1 - 2**-32)) for number in numbers]
