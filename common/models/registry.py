"""Model classes by the architecture's name in config.json, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from common.errors import CheckpointError

if TYPE_CHECKING:
    from common.models.llama import Llama

_MODELS = {"LlamaForCausalLM": "common.models.llama.Llama"}


def model_class(architecture: str) -> type[Llama]:
    """Raises CheckpointError naming what is supported."""
    path = _MODELS.get(architecture)
    if path is None:
        raise CheckpointError(f"architecture {architecture!r} is not supported, supported are {sorted(_MODELS)}")
    module, _, name = path.rpartition(".")
    found: type[Llama] = getattr(importlib.import_module(module), name)
    return found
