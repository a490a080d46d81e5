"""The pool: the tensor that holds every KV block, and its bytes. Who owns which block it does not know."""

from __future__ import annotations

import numpy as np
import torch

from common.kv_layout import KVLayout
from kernels import ops

Pairs = tuple[tuple[int, int], ...]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], zeroed; block 0 is the null block.

    host_pool: [num_host_blocks, ...], where blocks of preempted requests wait.
    memory, readonly_memory: the pool's bytes, flat, for the fetch plane.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        pool_bytes, self.pool = _allocate(layout, num_blocks)
        _, self.host_pool = _allocate(layout, num_host_blocks)
        self.memory = pool_bytes.data.cast("B")
        self.readonly_memory = self.memory.toreadonly()

    def copy_blocks(self, pairs: Pairs) -> None:
        """(source, destination) pairs within the pool, whole blocks, all layers."""
        _copy(self.pool, self.pool, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """(pool block, host block) pairs."""
        _copy(self.pool, self.host_pool, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """(host block, pool block) pairs."""
        _copy(self.host_pool, self.pool, pairs)

    def zero_tail(self, block_id: int, first_slot: int) -> None:
        """Slots first_slot .. of a block, all layers: nothing of an earlier owner leaves with a partial block."""
        self.pool[block_id, :, :, :, first_slot:].zero_()


def _allocate(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, torch.Tensor]:
    """Zeroed memory as flat bytes, and the same as a tensor of blocks."""
    flat_bytes = np.zeros(num_blocks * layout.block_bytes, np.uint8)  # lazily backed: pages come with first use
    dtype = TORCH_DTYPES[layout.dtype]
    flat = torch.from_numpy(flat_bytes).view(dtype) if num_blocks else torch.empty(0, dtype=dtype)
    ops.want_huge_pages(flat)  # a block is found anywhere in the pool: on small pages each would cost a walk of its own
    return flat_bytes, flat.view(num_blocks, *layout.block_shape())


def _copy(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """All of a step's copies of one kind in one operation."""
    if pairs:
        ops.copy_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))
