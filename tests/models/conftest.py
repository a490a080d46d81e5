"""Tiny random Llama checkpoints made with transformers, and our model run over a paged pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.kv_layout import KVDType, Quantization
from common.layers.linear import WeightForm
from common.model_config import load_model_config
from common.models.llama import Llama
from common.models.loader import load_model
from common.request import Request
from common.runner.factory import make_layout
from common.runner.input_batch import InputBatch
from common.runner.kv_cache import TORCH_DTYPES, KVCache
from common.scheduling.output import ScheduledRequest
from kernels.plan import AttentionShape

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "initializer_range": 0.3,
}


def make_tiny(directory: Path, **changes: Any) -> LlamaForCausalLM:
    """Writes a checkpoint into the directory; the reference model."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(BASE | changes))).eval()
    model.save_pretrained(directory)
    return model


class Paged:
    """Our model over a paged pool with shuffled blocks."""

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int = 8,
        dtype: KVDType = "float32",
        quantization: Quantization = "none",
    ) -> None:
        config = load_model_config(directory)
        form = WeightForm(TORCH_DTYPES[dtype], quantization)
        self.model: Llama = load_model(directory, config, form, has_head=True)
        self.layout = make_layout(config, block_size, dtype, quantization)
        self.cache = KVCache(self.layout, 200)
        layout = self.layout
        self.shape = AttentionShape(
            layout.num_layers,
            config.num_heads,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
            TORCH_DTYPES[dtype],
        )
        self._input_batch = InputBatch(self.shape)
        self._free = torch.randperm(199).add(1).tolist()
        self._tables: dict[str, list[int]] = {}

    @torch.inference_mode()
    def logits(self, parts: Sequence[tuple[str, list[int], int, int]]) -> torch.Tensor:
        """parts: (request, all its tokens, first row, number of rows) in one flat batch; logits of all rows."""
        scheduled = []
        for name, tokens, start, count in parts:
            table = self._tables.setdefault(name, [])
            while len(table) * self.layout.block_size < start + count:
                table.append(self._free.pop())
            scheduled.append(ScheduledRequest(Request(name, tokens), start, count, table, is_last_chunk=True))
        batch = self._input_batch.make(scheduled)
        hidden = self.model.forward(batch, self.cache.pool, lambda _layer: True)
        assert hidden is not None
        return self.model.logits(hidden)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[LlamaForCausalLM, Paged]]:
    """Makes a checkpoint with these changes: transformers' model and ours."""

    def make(block_size: int = 8, dtype: KVDType = "float32", **changes: Any) -> tuple[LlamaForCausalLM, Paged]:
        return make_tiny(tmp_path, **changes), Paged(tmp_path, block_size=block_size, dtype=dtype)

    return make


@pytest.fixture
def write_tiny() -> Callable[..., LlamaForCausalLM]:
    return make_tiny
