"""The pool: the tensor that holds every KV block, and its bytes. Who owns which block it does not know."""

from __future__ import annotations

import numpy as np
import torch

from common.kv_layout import KVLayout
from kernels import ops

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], zeroed; block 0 is the null block.

    memory, readonly_memory: the same bytes, flat, for the fetch plane.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._bytes = np.zeros(num_blocks * layout.block_bytes, np.uint8)  # lazily backed: pages come with first use
        flat = torch.from_numpy(self._bytes).view(TORCH_DTYPES[layout.dtype])
        self.pool = flat.view(num_blocks, *layout.block_shape())
        self.memory = self._bytes.data.cast("B")
        self.readonly_memory = self.memory.toreadonly()

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """(source, destination) pairs, whole blocks, all layers."""
        if pairs:
            sources, destinations = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            ops.copy_blocks(self.pool, sources, destinations)

    def zero_tail(self, block_id: int, first_slot: int) -> None:
        """Slots first_slot .. of a block, all layers: nothing of an earlier owner leaves with a partial block."""
        self.pool[block_id, :, :, :, first_slot:].zero_()
