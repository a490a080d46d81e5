"""Writes a float32 safetensors file tensor by tensor, so that a model never has to fit in memory as a whole.

The library's own writer takes all tensors at once. Format: 8 bytes little-endian header length, a JSON header with
dtype, shape and byte range of each tensor, then the data (github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = 4


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    load: Callable[[str], npt.NDArray[np.float32]],
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """`load(name)` is called once for each tensor, in order; `on_written(bytes)` after each."""
    with path.open("wb") as file:
        file.write(_header(shapes))
        for name, shape in shapes.items():
            values = load(name)
            assert values.shape == shape, f"{name} is {values.shape}, announced as {shape}"
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
            on_written(values.nbytes)


def num_data_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(_num_bytes, shapes.values()))


def _num_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _num_bytes(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
