"""Content addresses of full KV blocks.

    h_i = sha256(h_{i-1} || token ids of block i as little-endian uint32)[:16]

The root hashes a version tag and length-delimited, tagged ingredients, so that blocks of another model, layout,
adapter or tenant (`cache_salt`) never match. Nothing is process-random: every node computes the same values.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from common.kv_layout import KVLayout

BlockHash = bytes
_VERSION = b"tandem-block-hash-1"
_HASH_BYTES = 16


def root_hash(layout: KVLayout, *, cache_salt: str = "", adapter: str = "") -> BlockHash:
    """Parent of every first block. `adapter` is the content digest of a LoRA adapter, empty for the base model."""
    digest = hashlib.sha256(_VERSION)
    for tag, value in (("layout", layout.fingerprint), ("adapter", adapter), ("salt", cache_salt)):
        for piece in (tag.encode(), value.encode()):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()[:_HASH_BYTES]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; raises OverflowError for ids outside 0 .. 2**32 - 1."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.sha256(parent + token_bytes(token_ids)).digest()[:_HASH_BYTES]


def extend_chain(chain: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Append to `chain` the hashes of the full blocks of `token_ids` that it does not hold yet; returns it."""
    parent = chain[-1] if chain else root
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = next_hash(parent, token_ids[start : start + block_size])
        chain.append(parent)
    return chain
