"""Reads one GGUF file: its metadata by key, its tensors as float32 in the order and shape that Hugging Face uses.

Knows the container format (through the `gguf` package), not what the keys and names mean. Whatever is wrong with the
file comes out as a CheckpointError that names it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from common.errors import CheckpointError

_T = TypeVar("_T")
_READ_ERRORS = (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, struct.error, OSError)


class GGUFFile:
    """An open (memory-mapped) GGUF file. Raises CheckpointError when it is no whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._named_errors():
            reader = GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first, as in torch (GGUF lists the fastest dimension first)."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The dequantised values of one tensor, contiguous, of shape `shape(name)`."""
        tensor = self._tensors[name]
        try:
            values = self._dequantized(tensor)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which gguf cannot dequantise"
            ) from None
        return np.ascontiguousarray(values.reshape(self.shape(name)), dtype=np.float32)

    def type_name(self, name: str) -> str:
        """As GGUF calls it: F32, Q4_1, ..."""
        return self._tensors[name].tensor_type.name

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a matrix of a block type as they stand in the file, [rows, bytes of a row]."""
        return self._tensors[name].data.view(np.uint8).reshape(self.shape(name)[0], -1)

    def _dequantized(self, tensor: ReaderTensor) -> npt.NDArray[np.float32]:
        with self._named_errors():
            values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        return values

    def get(self, key: str, default: _T) -> Any | _T:
        return self._fields.get(key, default)

    def require(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return self._fields[key]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except _READ_ERRORS as error:
            raise CheckpointError(
                f"{self.path} is not a whole GGUF file (damaged, or cut short while it was copied): {error}"
            ) from None
