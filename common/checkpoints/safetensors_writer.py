"""Writes a safetensors file tensor by tensor, so that a model never has to fit in memory as a whole.

The library's own writer takes all tensors at once. Format: 8 bytes little-endian header length, a JSON header with
dtype, shape and byte range of each tensor, then the data (github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

_NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "U8": np.dtype("u1")}


@dataclass(frozen=True)
class TensorSpec:
    """dtype: as the format names it."""

    shape: tuple[int, ...]
    dtype: Literal["F32", "F16", "U8"] = "F32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _NUMPY_DTYPES[self.dtype].itemsize


def write_safetensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    load: Callable[[str], npt.NDArray[Any]],
    on_written: Callable[[int], object] = lambda num_bytes: None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """`load(name)` is called once for each tensor, in order; `on_written(bytes)` after each."""
    with path.open("wb") as file:
        file.write(_header(specs, {"format": "pt", **(metadata or {})}))
        for name, spec in specs.items():
            values = load(name)
            assert values.shape == spec.shape, f"{name} is {values.shape}, announced as {spec.shape}"
            file.write(np.ascontiguousarray(values, dtype=_NUMPY_DTYPES[spec.dtype]).data)
            on_written(spec.num_bytes)


def num_data_bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs.values())


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
