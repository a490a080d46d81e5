"""Fills a model from safetensors files: every parameter is filled and every tensor used, or it is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError
from common.layers.linear import Weight, WeightForm
from common.model_config import ModelConfig, weight_files
from common.models.gguf_weights import GGUFWeights
from common.models.llama import Llama
from common.models.registry import model_class

log = logging.getLogger(__name__)

Read = Callable[[], torch.Tensor]


def load_model(
    directory: Path, config: ModelConfig, form: WeightForm, *, has_head: bool, max_positions: int | None = None
) -> Llama:
    """Raises CheckpointError naming the file and the tensor at fault."""
    model = model_class(config.architecture)(config, form, has_head=has_head, max_positions=max_positions)
    with GGUFWeights(directory) if form.quantization == "gguf" else nullcontext() as gguf:
        _fill(model, directory, gguf)
        if gguf is not None:
            log.info("matrices of the GGUF file: %s", gguf.describe(model.weight_formats()))
    return model


def _fill(model: Llama, directory: Path, gguf: GGUFWeights | None) -> None:
    seen: set[str] = set()
    for file in weight_files(directory):
        for name, read in _tensors(file):
            if name in seen:
                raise CheckpointError(f"{file}: tensor {name!r} is in two files")
            seen.add(name)
            load = model.loader(name)
            if load is None:
                continue
            quantized: Weight | None = None if gguf is None else gguf.get(name)
            try:
                load(read() if quantized is None else quantized)
            except ValueError as error:
                raise CheckpointError(f"{file}: tensor {name!r} {error}") from None
    if unfilled := model.finish_loading():
        raise CheckpointError(f"{directory}: no weights for {', '.join(unfilled[:5])} ({len(unfilled)} in all)")


def _tensors(file: Path) -> Iterator[tuple[str, Read]]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                yield name, partial(opened.get_tensor, name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
