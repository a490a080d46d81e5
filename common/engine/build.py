"""Puts an engine together from a model directory and a node's flags: weights, pool, scheduler, runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from common.config import NodeFlags
from common.engine.engine import Engine
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.model_config import ModelConfig, load_model_config
from common.runner.factory import load_runner, make_layout
from common.runner.kv_cache import KVCache
from common.runner.memory import num_blocks_that_fit
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    engine: Engine
    kv_cache: KVCache
    layout: KVLayout
    model_config: ModelConfig
    max_model_len: int


def build_engine(model_dir: Path, flags: NodeFlags, *, with_head: bool) -> EngineParts:
    """Raises ConfigError or CheckpointError when the model or a flag does not fit.

    with_head: False for a node that never samples and so needs no output head.
    """
    config = load_model_config(model_dir)
    max_model_len = resolve_max_model_len(flags.max_model_len, config)
    layout = make_layout(config, flags.block_size, flags.dtype)
    num_blocks = flags.num_gpu_blocks_override or num_blocks_that_fit(
        layout, flags.kv_cache_memory_bytes, max_model_len=max_model_len
    )
    runner, kv_cache = load_runner(
        model_dir, config, layout, num_blocks, with_head=with_head, num_threads=flags.resolved_num_threads
    )
    cache = KVCacheManager(layout, num_blocks, enable_prefix_caching=flags.enable_prefix_caching)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=flags.max_num_batched_tokens,
            max_num_seqs=flags.max_num_seqs,
            max_model_len=max_model_len,
        ),
        cache,
    )
    log.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB; a full-length request of %d tokens fits %.1f times",
        cache.pool.num_usable,
        layout.block_size,
        num_blocks * layout.block_bytes / 2**30,
        max_model_len,
        cache.capacity_tokens / max_model_len,
    )
    return EngineParts(Engine(scheduler, runner), kv_cache, layout, config, max_model_len)


def resolve_max_model_len(wanted: int | None, config: ModelConfig) -> int:
    """The flag, or the model's own context. Raises ConfigError when more is asked than the model has."""
    longest = config.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"--max-model-len is {wanted}, the model's context has {longest} tokens")
    return wanted or longest
