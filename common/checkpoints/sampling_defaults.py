"""What sampling fields mean that a request leaves out: what the model's generation_config.json says, if anything.

The rule is vLLM's (docs/sampling.md): what a request says wins, then the model's file, then the neutral values of the
API. Knows no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.model_config import read_json
from common.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_INTEGERS = frozenset({"top_k", "max_new_tokens"})


@dataclass(frozen=True)
class SamplingDefaults:
    """values: of request fields, by name. max_tokens: of a chat answer; None fills the context."""

    values: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None


def load_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Of generation_config.json; neutral if there is none. Raises CheckpointError naming field, value and limit."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    config = read_json(path)
    found = {name: config[name] for name in (*_FIELDS, "max_new_tokens") if config.get(name) is not None}
    for name, value in found.items():
        _check_number(path, name, value)
    max_tokens = found.pop("max_new_tokens", None)
    try:
        SamplingParams(**found, max_tokens=max_tokens)
    except ValueError as error:
        raise _error(path, str(error).replace("max_tokens", "max_new_tokens")) from None
    return SamplingDefaults(found, max_tokens)


def _check_number(path: Path, name: str, value: Any) -> None:
    kinds = (int,) if name in _INTEGERS else (int, float)
    if type(value) not in kinds:
        raise _error(path, f"{name} is {value!r}, must be {'an integer' if name in _INTEGERS else 'a number'}")


def _error(path: Path, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: {text}; --generation-config vllm leaves the file's sampling values out")
