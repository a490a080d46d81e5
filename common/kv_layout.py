"""The shape of KV memory, shared by every node of a cluster. Knows no tensor and no device.

A pool is one flat piece of memory, logically

    [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

so that a block is contiguous across layers (send, swap, store), and so is one layer of a block (layer-wise
transfer). Two nodes may exchange blocks only when their layouts' fingerprints are equal.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, get_args

KVDType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "gguf"]
"""What a model's matrices are multiplied as; gguf: in the 4 or 8 bits of the GGUF file that they came in."""
BLOCK_SIZES = (8, 16, 32)
_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDType
    model_fingerprint: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}, must be one of {BLOCK_SIZES}")
        if self.dtype not in get_args(KVDType):
            raise ValueError(f"KV dtype is {self.dtype!r}, must be one of {get_args(KVDType)}")

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, K and V."""
        return self.block_bytes // self.block_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block (K and V)."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @cached_property
    def fingerprint(self) -> str:
        """Equal exactly when two pools can exchange blocks."""
        text = "|".join(f"{k}={v}" for k, v in sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def describe(self) -> str:
        """For mismatch messages: every ingredient, on one line."""
        return ", ".join(f"{k} {v}" for k, v in asdict(self).items())
