"""The matrices of a GGUF file in their own 4 or 8 bits, as a safetensors file beside the float32 ones.

    NAME.q        uint8 [out, in] for 8 bits, counted from 128; for 4 bits [out, in / 2] in the order that GGUF has: of
                  each group of 32 inputs 16 bytes, byte i with input i (low bits) and input i + 16 (high bits)
    NAME.scales   float16 [out, in / 32]
    NAME.offsets  float16 [out, in / 32], where the type has them
    metadata      "weights": by name the GGUF type of every matrix, and format and group size of those that are here

A weight is scale * q + offset, without offsets scale * (q - 128) or scale * (q - 8): in float32 the very numbers of the
float32 file. It lies in a folder of its own because every safetensors file of a checkpoint's folder is weights of it.
common/models/gguf_weights.py reads it. Source of the types: ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from common.checkpoints.safetensors_writer import TensorSpec, write_safetensors

if TYPE_CHECKING:
    from common.checkpoints.gguf_file import GGUFFile

QUANTIZED_FILE: Final = Path("quantized", "weights.safetensors")
"""Below the checkpoint's folder; there where the checkpoint was made of a GGUF file."""

GROUP_SIZE: Final = 32
_FLOAT16_BYTES: Final = 2

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Type:
    """A block of 32 weights of one row: a float16 scale, a float16 offset where there is one, then the integers."""

    format: str
    has_offsets: bool

    @property
    def q_bytes(self) -> int:
        return GROUP_SIZE if self.format == "int8" else GROUP_SIZE // 2

    @property
    def block_bytes(self) -> int:
        return _FLOAT16_BYTES * (2 if self.has_offsets else 1) + self.q_bytes


_TYPES: Final = {"Q4_0": _Type("int4", False), "Q4_1": _Type("int4", True), "Q8_0": _Type("int8", False)}


def write_quantized(
    gguf: GGUFFile,
    sources: Mapping[str, str],
    directory: Path,
    reordered: Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]],
    on_written: Callable[[int], object],
) -> None:
    """sources: GGUF names by Hugging Face name. reordered(name, rows): the rows in Hugging Face's order."""
    matrices = {name: source for name, source in sources.items() if len(gguf.shape(source)) == 2}
    kinds = {name: gguf.type_name(source) for name, source in matrices.items()}
    specs = quantized_specs(gguf, sources)

    def load(tensor_name: str) -> npt.NDArray[Any]:
        name, _, part = tensor_name.rpartition(".")
        return reordered(name, _part(gguf.raw(matrices[name]), _TYPES[kinds[name]], part))

    path = directory / QUANTIZED_FILE
    path.parent.mkdir()
    metadata = {"weights": json.dumps({name: _description(kind) for name, kind in kinds.items()})}
    write_safetensors(path, specs, load, on_written, metadata=metadata)


def quantized_specs(gguf: GGUFFile, sources: Mapping[str, str]) -> dict[str, TensorSpec]:
    """What the file holds, in order."""
    specs = {}
    for name, source in sources.items():
        kind, shape = _TYPES.get(gguf.type_name(source)), gguf.shape(source)
        if kind is None or len(shape) != 2:
            continue
        num_groups = shape[1] // GROUP_SIZE
        specs[f"{name}.q"] = TensorSpec((shape[0], num_groups * kind.q_bytes), "U8")
        for part in ("scales", "offsets")[: 2 if kind.has_offsets else 1]:
            specs[f"{name}.{part}"] = TensorSpec((shape[0], num_groups), "F16")
    return specs


def _description(kind: str) -> dict[str, str | int]:
    found = _TYPES.get(kind)
    return {"type": kind} if found is None else {"type": kind, "format": found.format, "group_size": GROUP_SIZE}


def _part(rows: Bytes, kind: _Type, part: str) -> npt.NDArray[Any]:
    """rows: [out, bytes of a row]."""
    blocks = rows.reshape(rows.shape[0], -1, kind.block_bytes)
    if part == "q":
        q = blocks[:, :, kind.block_bytes - kind.q_bytes :].reshape(rows.shape[0], -1)
        return q ^ 128 if kind.format == "int8" else q  # signed bytes as unsigned ones, 128 higher
    at = {"scales": 0, "offsets": _FLOAT16_BYTES}[part]
    return np.ascontiguousarray(blocks[:, :, at : at + _FLOAT16_BYTES]).view("<f2")[:, :, 0]
