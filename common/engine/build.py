"""Puts an engine together from a model directory and a node's flags.

    flags -> weights -> profiling run -> number of blocks -> pool -> scheduler, runner

Only after the profiling run is known how much memory is left for the pool.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from common.config import EngineFlags
from common.engine.engine import Engine
from common.engine.step_log import check_can_record
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.logging import log_event
from common.model_config import ModelConfig, load_model_config
from common.models.llama import Llama
from common.runner.factory import (
    Precision,
    load_weights,
    make_layout,
    make_runner,
    resolve_precision,
    use_kernels,
)
from common.runner.kv_cache import KVCache
from common.runner.memory import (
    MemoryUse,
    PoolPlan,
    check_memory_flags,
    describe_worst_step,
    has_given_size,
    mib,
    plan_pool,
)
from common.runner.process_memory import ProcessMemory
from common.runner.profile import run_worst_step
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    engine: Engine
    kv_cache: KVCache
    layout: KVLayout
    model_config: ModelConfig
    max_model_len: int


def build_engine(model_dir: Path, flags: EngineFlags, *, with_head: bool) -> EngineParts:
    """Raises ConfigError or CheckpointError when the model or a flag does not fit.

    with_head: False for a node that never samples and so needs no output head.
    """
    if flags.record_steps is not None:
        check_can_record(flags.record_steps)
    config = load_model_config(model_dir)
    max_model_len = resolve_max_model_len(flags.max_model_len, config)
    kernels = use_kernels(flags)
    precision = resolve_precision(model_dir, config, flags)
    layout = make_layout(
        config,
        flags.block_size,
        precision.dtype,
        precision.quantization,
        exact_activations=flags.exact_activations,
    )
    limits = _scheduler_config(flags, max_model_len, with_head=with_head)
    check_memory_flags(flags, limits)
    _warn_of_flags_without_effect(flags, limits)
    model, use = _load_and_measure(model_dir, config, precision, layout, limits, flags, with_head=with_head)
    plan = plan_pool(use, layout, flags, limits, with_head=with_head)
    _log_plan(plan)
    cache = KVCacheManager(
        layout,
        plan.num_blocks,
        enable_prefix_caching=flags.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
    )
    kv_cache = KVCache(layout, plan.num_blocks, plan.num_host_blocks)
    _log_summary(model_dir, flags, kernels.name, precision, limits, use, plan)
    engine = Engine(Scheduler(limits, cache), make_runner(model, kv_cache))
    return EngineParts(engine, kv_cache, layout, config, max_model_len)


def resolve_max_model_len(wanted: int | None, config: ModelConfig) -> int:
    """The flag, or the model's own context. Raises ConfigError when more is asked than the model has."""
    longest = config.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"--max-model-len is {wanted}, the model's context has {longest} tokens")
    return wanted or longest


def _scheduler_config(flags: EngineFlags, max_model_len: int, *, with_head: bool) -> SchedulerConfig:
    """A node without a head preempts nobody and has no host pool, whatever the flags of its cluster say."""
    budget = flags.max_num_batched_tokens
    if not flags.enable_chunked_prefill and "max_num_batched_tokens" not in flags.model_fields_set:
        budget = max(budget, max_model_len)
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=flags.max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=flags.enable_chunked_prefill,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
        max_num_partial_prefills=flags.max_num_partial_prefills,
        scheduling_policy=flags.scheduling_policy,
        preemption_mode=flags.preemption_mode if with_head else "recompute",
    )


def _warn_of_flags_without_effect(flags: EngineFlags, limits: SchedulerConfig) -> None:
    if "gpu_memory_utilization" in flags.model_fields_set:
        log.warning(
            "--gpu-memory-utilization has no effect: this engine computes on the CPU, where"
            " --cpu-memory-utilization (now %g) rules",
            flags.cpu_memory_utilization,
        )
    if limits.max_num_running < limits.max_num_seqs:
        log.warning(
            "at most %d requests run at once: --max-num-seqs is %d, but --max-num-batched-tokens only %d",
            limits.max_num_running,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
        )


def _load_and_measure(
    model_dir: Path,
    config: ModelConfig,
    precision: Precision,
    layout: KVLayout,
    limits: SchedulerConfig,
    flags: EngineFlags,
    *,
    with_head: bool,
) -> tuple[Llama, MemoryUse]:
    memory = ProcessMemory()
    process_bytes = memory.held_bytes()
    model = load_weights(
        model_dir,
        config,
        precision.dtype,
        with_head=with_head,
        num_threads=flags.resolved_num_threads,
        max_model_len=flags.max_model_len,
        quantization=precision.quantization,
        cpu_kernels=flags.cpu_kernels,
        exact_activations=flags.exact_activations,
    )
    weight_bytes = memory.held_bytes() - process_bytes
    peak = None
    if not has_given_size(flags):
        log.info("measuring the memory of the worst step: %s", describe_worst_step(limits))
        peak = memory.measure_peak(lambda: run_worst_step(model, layout, limits))
    return model, MemoryUse(memory.limit(), memory.free(), process_bytes, weight_bytes, peak)


def _log_summary(
    model_dir: Path,
    flags: EngineFlags,
    kernels: str,
    precision: Precision,
    limits: SchedulerConfig,
    use: MemoryUse,
    plan: PoolPlan,
) -> None:
    """What was chosen, and what it costs."""
    log_event(
        log,
        "engine_ready",
        model=model_dir.name,
        device="cpu",
        kernels=kernels,
        dtype=precision.dtype,
        quantization=precision.quantization,
        threads=flags.resolved_num_threads,
        max_model_len=limits.max_model_len,
        token_budget=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_running,
        blocks=plan.num_usable,
        block_size=plan.layout.block_size,
        prefix_caching=flags.enable_prefix_caching,
        preemption=limits.preemption_mode,
        weights=mib(use.weight_bytes),
        kv=mib(plan.num_usable * plan.layout.block_bytes),
        swap=mib(plan.num_host_blocks * plan.layout.block_bytes),
    )


def _log_plan(plan: PoolPlan) -> None:
    log.info("KV memory, line by line:")
    for line in plan.lines:
        log.info("%s", line)
    log.info(
        "KV pool: %d blocks of %d tokens (%s each, one more takes unwanted writes);"
        " %.1f full-length requests of %d tokens fit",
        plan.num_usable,
        plan.layout.block_size,
        mib(plan.layout.block_bytes),
        math.floor(plan.num_full_length * 10) / 10,
        plan.max_model_len,
    )
    if plan.num_host_blocks:
        log.info("host pool: %d blocks for preempted requests", plan.num_host_blocks)
    if plan.capacity_tokens < plan.max_model_len:
        log.warning(
            "requests longer than %d tokens are refused, prompt and answer: the KV pool holds no more"
            " (--num-gpu-blocks-override); --max-model-len is %d",
            plan.capacity_tokens,
            plan.max_model_len,
        )
