"""Cuts pool blocks into units: a unit is one group of consecutive layers of one block, contiguous in the pool.

Knows byte ranges only. Today both ends use one group of all layers; the frames carry group indices already.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv_layout import KVLayout


@dataclass(frozen=True)
class LayoutPlan:
    layout: KVLayout
    num_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_groups <= self.layout.num_layers:
            raise ValueError(f"num_groups is {self.num_groups}, must be 1 to {self.layout.num_layers} (num_layers)")

    def _first_layer(self, group: int) -> int:
        return group * self.layout.num_layers // self.num_groups

    def unit_bytes(self, group: int) -> int:
        return (self._first_layer(group + 1) - self._first_layer(group)) * self.layout.layer_bytes

    @property
    def max_unit_bytes(self) -> int:
        return max(self.unit_bytes(group) for group in range(self.num_groups))

    def unit_range(self, block_id: int, group: int) -> slice:
        """Where the unit of pool block `block_id` lies in the pool's bytes."""
        start = block_id * self.layout.block_bytes + self._first_layer(group) * self.layout.layer_bytes
        return slice(start, start + self.unit_bytes(group))
