"""The pool's bytes are its tensor."""

from __future__ import annotations

import pytest
import torch

from common.kv_layout import KVDType, KVLayout
from common.runner.kv_cache import KVCache


def make_layout(dtype: KVDType = "float32") -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype=dtype, model_fingerprint="m")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_of_a_block_are_its_contiguous_piece_of_memory(dtype: KVDType) -> None:
    layout = make_layout(dtype)
    cache = KVCache(layout, 5)
    assert cache.pool.shape == (5, *layout.block_shape())
    assert cache.pool.is_contiguous()
    assert len(cache.memory) == 5 * layout.block_bytes
    cache.pool[3] = 1.5
    one = torch.tensor([1.5]).to(cache.pool.dtype).view(torch.uint8).numpy().tobytes()
    begin = 3 * layout.block_bytes
    assert bytes(cache.memory[begin : begin + layout.block_bytes]) == one * (layout.block_bytes // len(one))
    assert not any(cache.memory[:begin])


def test_what_is_written_into_memory_is_in_the_pool() -> None:
    cache = KVCache(make_layout(), 3)
    source = KVCache(make_layout(), 3)
    source.pool.normal_()
    size = cache.layout.block_bytes
    cache.memory[size : 2 * size] = source.readonly_memory[2 * size :]
    assert torch.equal(cache.pool[1], source.pool[2])
    with pytest.raises(TypeError):
        source.readonly_memory[0] = 1


def test_zero_tail_clears_all_layers_from_the_slot_on() -> None:
    cache = KVCache(make_layout(), 3)
    cache.pool.fill_(2.0)
    cache.zero_tail(1, 5)
    assert torch.all(cache.pool[1, :, :, :, 5:] == 0)
    assert torch.all(cache.pool[1, :, :, :, :5] == 2)
    assert torch.all(cache.pool[[0, 2]] == 2)
