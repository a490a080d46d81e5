"""Fills a model from safetensors files: every parameter is filled and every tensor used, or it is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError
from common.model_config import ModelConfig, weight_files
from common.models.llama import Llama
from common.models.registry import model_class


def load_model(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype, has_head: bool, max_positions: int | None = None
) -> Llama:
    """Raises CheckpointError naming the file and the tensor at fault."""
    model = model_class(config.architecture)(config, dtype=dtype, has_head=has_head, max_positions=max_positions)
    seen: set[str] = set()
    for file in weight_files(directory):
        for name, tensor in tensors(file):
            if name in seen:
                raise CheckpointError(f"{file}: tensor {name!r} is in two files")
            seen.add(name)
            load = model.loader(name)
            if load is None:
                continue
            try:
                load(tensor)
            except ValueError as error:
                raise CheckpointError(f"{file}: tensor {name!r} {error}") from None
    if unfilled := model.finish_loading():
        raise CheckpointError(f"{directory}: no weights for {', '.join(unfilled[:5])} ({len(unfilled)} in all)")
    return model


def tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
