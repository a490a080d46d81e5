"""The compiled kernels: whether there are any, for which instruction set, and the threads that run them.

One Machine (threads, working memory) serves a process. What was made for one, such as a packed weight, keeps it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.cpu import _native

_compiled: ModuleType | None = None
_why_missing = ""
try:
    from kernels.cpu import _native as _found
except ImportError as error:
    _why_missing = f"the compiled kernels are not there ({error}); install again where a C++ compiler is"
else:
    _compiled = _found


class NativeKernelsError(Exception):
    """The compiled kernels cannot serve; the text says why."""


def instruction_sets() -> list[str]:
    """What this CPU can run of what was built, best first; empty where nothing was built."""
    return [] if _compiled is None else list(_compiled.instruction_sets())


def why_missing() -> str:
    return _why_missing


class _Process:
    """What this process computes with; `configure` replaces it."""

    def __init__(self) -> None:
        self.machine: _native.Machine | None = None
        self.is_exact = False


_process = _Process()


def configure(instruction_set: str, num_threads: int, *, is_exact: bool) -> None:
    """Raises NativeKernelsError when this CPU or this build does not have the instruction set."""
    if _compiled is None:
        raise NativeKernelsError(_why_missing)
    if instruction_set not in instruction_sets():
        raise NativeKernelsError(f"no kernels for {instruction_set!r} here, there are {instruction_sets()}")
    now = _process.machine
    if now is None or (now.instruction_set, now.num_threads) != (instruction_set, num_threads):
        _process.machine = _compiled.Machine(instruction_set, num_threads)
    _process.is_exact = is_exact


def machine() -> _native.Machine:
    """The process's machine; without `configure` the best instruction set and one thread. Raises NativeKernelsError."""
    if _process.machine is None:
        configure(next(iter(instruction_sets()), ""), 1, is_exact=False)
    assert _process.machine is not None
    return _process.machine


def is_exact() -> bool:
    """Activations are never rounded to a weight's format."""
    return _process.is_exact
