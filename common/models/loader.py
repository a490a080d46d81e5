"""Fills a model from safetensors files: every parameter is filled and every tensor used, or it is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError
from common.model_config import INDEX_FILE, ModelConfig
from common.models.llama import Llama
from common.models.registry import model_class


def load_model(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype, has_head: bool, max_positions: int | None = None
) -> Llama:
    """Raises CheckpointError naming the file and the tensor at fault."""
    model = model_class(config.architecture)(config, dtype=dtype, has_head=has_head, max_positions=max_positions)
    for file in weight_files(directory):
        for name, tensor in tensors(file):
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


def weight_files(directory: Path) -> list[Path]:
    """The one file, or the shards that the index names. Raises CheckpointError when one is missing."""
    index = directory / INDEX_FILE
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is missing")
    return [directory / name for name in names]


def tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
