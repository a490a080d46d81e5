"""The pool's bytes are its tensor, and how many blocks a budget holds."""

from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from common.kv_layout import KVDType, KVLayout
from common.runner import memory
from common.runner.kv_cache import KVCache
from common.runner.memory import num_blocks_that_fit


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


def test_a_budget_in_bytes_holds_so_many_whole_blocks() -> None:
    layout = make_layout()
    assert num_blocks_that_fit(layout, 10 * layout.block_bytes + 1, max_model_len=16) == 10


def test_a_budget_too_small_or_too_large_names_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout()
    with pytest.raises(ConfigError, match=f"of {layout.block_bytes} bytes"):
        num_blocks_that_fit(layout, layout.block_bytes, max_model_len=16)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 << 30)
    with pytest.raises(ConfigError, match=r"3\.00 GiB and 2\.00 GiB are free"):
        num_blocks_that_fit(layout, 3 << 30, max_model_len=16)


def test_without_a_budget_one_request_of_the_longest_length_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout()
    monkeypatch.setattr(memory, "available_bytes", lambda: 200 * layout.block_bytes)
    assert num_blocks_that_fit(layout, None, max_model_len=8) == 20  # a tenth of what is free
    assert num_blocks_that_fit(layout, None, max_model_len=8 * 50) == 51
