"""The only source of randomness of sampling: a uniform number that is a pure function of (seed, choice, output index).

SplitMix64 (Steele, Lea, Flood 2014) as a hash of the three, in integer arithmetic: the same on every device, whatever
else is in the batch, and after preemption, hand-off and failover.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, output_index: int) -> float:
    """In [0, 1), with 53 random bits."""
    state = _mix((seed & _MASK) + _GOLDEN)
    state = _mix(state ^ (choice + 1) * _GOLDEN & _MASK)
    state = _mix(state ^ (output_index + 1) * _GOLDEN & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
