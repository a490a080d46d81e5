"""Which kernels a test runs on: every instruction set of this CPU, and plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels import dispatch
from kernels.cpu import native

UseKernels = Callable[..., None]


def _use(monkeypatch: pytest.MonkeyPatch, name: str) -> UseKernels:
    """What the process had chosen comes back when the test ends."""
    monkeypatch.setattr(dispatch, "_chosen", dispatch._Chosen())
    monkeypatch.setattr(native, "_process", native._Process())

    def use(num_threads: int = 2, is_exact: bool = False) -> None:
        dispatch.use_cpu_kernels(name, num_threads=num_threads, is_exact=is_exact)

    use()
    return use


@pytest.fixture(params=[*native.instruction_sets(), dispatch.REFERENCE])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UseKernels:
    """Called, it changes the number of threads (two) or the exactness (rounded activations)."""
    return _use(monkeypatch, request.param)


@pytest.fixture(params=native.instruction_sets())
def native_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UseKernels:
    """The same of compiled kernels only: for what they alone promise."""
    return _use(monkeypatch, request.param)
