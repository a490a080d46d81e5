"""Makes a model, a layout and a runner from a model directory."""

from __future__ import annotations

from pathlib import Path

import torch

from common.kv_layout import KVDType, KVLayout
from common.model_config import ModelConfig
from common.models.llama import Llama
from common.models.loader import load_model
from common.runner.kv_cache import TORCH_DTYPES, KVCache
from common.runner.model_runner import ModelRunner
from common.runner.sampler import Sampler


def make_layout(config: ModelConfig, block_size: int, dtype: KVDType) -> KVLayout:
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        model_fingerprint=config.fingerprint,
    )


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: KVDType,
    *,
    with_head: bool,
    num_threads: int,
    max_model_len: int | None = None,
) -> Llama:
    """Sets the number of threads of this process's torch. Raises CheckpointError."""
    torch.set_num_threads(num_threads)
    return load_model(model_dir, config, dtype=TORCH_DTYPES[dtype], has_head=with_head, max_positions=max_model_len)


def make_runner(model: Llama, kv_cache: KVCache) -> ModelRunner:
    """A model without a head gets no sampler."""
    return ModelRunner(model, kv_cache, Sampler() if model.has_head else None)
