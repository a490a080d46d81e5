"""Makes a model, a layout and a runner from a model directory, and decides what they are computed with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineFlags
from common.errors import ConfigError
from common.kv_layout import KVDType, KVLayout, Quantization
from common.layers.linear import WeightForm
from common.model_config import ModelConfig
from common.models.gguf_weights import has_gguf_weights
from common.models.llama import Llama
from common.models.loader import load_model
from common.runner.kv_cache import TORCH_DTYPES, KVCache
from common.runner.model_runner import ModelRunner
from common.runner.sampler import Sampler
from kernels import dispatch
from kernels.cpu import native


@dataclass(frozen=True)
class Precision:
    """dtype: of what stays float, and of the KV pool."""

    dtype: KVDType
    quantization: Quantization = "none"


def use_kernels(flags: EngineFlags) -> dispatch.Choice:
    """Decides what this process computes with, and on how many threads. Raises ConfigError."""
    return _use_kernels(flags.cpu_kernels, flags.resolved_num_threads, is_exact=flags.exact_activations)


def resolve_precision(model_dir: Path, config: ModelConfig, flags: EngineFlags) -> Precision:
    """What `auto` means for this checkpoint and the kernels in use. Raises ConfigError."""
    return Precision(_resolve_dtype(flags, config), _resolve_quantization(flags, model_dir))


def make_layout(
    config: ModelConfig,
    block_size: int,
    dtype: KVDType,
    quantization: Quantization = "none",
    *,
    exact_activations: bool = False,
) -> KVLayout:
    """The fingerprint tells apart what computes other KV: nodes with other weights, or another precision of weights or
    activations."""
    rounds = (dtype, quantization) != ("float32", "none")  # else activations are exact whatever the flag says
    exact = ":exact" if exact_activations and rounds else ""
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        model_fingerprint=f"{config.fingerprint}:{dtype}:{quantization}{exact}",
    )


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: KVDType,
    *,
    with_head: bool,
    num_threads: int,
    max_model_len: int | None = None,
    quantization: Quantization = "none",
    cpu_kernels: str = dispatch.AUTO,
    exact_activations: bool = False,
) -> Llama:
    """Sets the number of threads of this process. Raises CheckpointError or ConfigError."""
    _use_kernels(cpu_kernels, num_threads, is_exact=exact_activations)
    form = WeightForm(TORCH_DTYPES[dtype], quantization)
    return load_model(model_dir, config, form, has_head=with_head, max_positions=max_model_len)


def make_runner(model: Llama, kv_cache: KVCache) -> ModelRunner:
    """A model without a head gets no sampler."""
    return ModelRunner(model, kv_cache, Sampler() if model.has_head else None)


def _use_kernels(wanted: str, num_threads: int, *, is_exact: bool) -> dispatch.Choice:
    torch.set_num_threads(num_threads)
    try:
        return dispatch.use_cpu_kernels(wanted, num_threads=num_threads, is_exact=is_exact)
    except native.NativeKernelsError as error:
        raise ConfigError(f"--cpu-kernels is {wanted!r}: {error}; auto takes the best there is") from None


def _resolve_dtype(flags: EngineFlags, config: ModelConfig) -> KVDType:
    if flags.dtype != "auto":
        return flags.dtype
    is_half = config.stored_dtype in ("bfloat16", "float16")
    is_native = dispatch.cpu_choice().name != dispatch.REFERENCE
    return "bfloat16" if is_half and is_native and native.machine().has_bfloat16 else "float32"


def _resolve_quantization(flags: EngineFlags, model_dir: Path) -> Quantization:
    is_gguf = has_gguf_weights(model_dir)
    if flags.quantization == "auto":
        return "gguf" if is_gguf else "none"
    if flags.quantization == "gguf" and not is_gguf:
        raise ConfigError(
            f"--quantization is 'gguf', but {model_dir} was not made of a GGUF file;"
            " int8 and int4 quantise any checkpoint when it is loaded"
        )
    return flags.quantization
