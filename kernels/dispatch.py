"""Which implementation serves an op on a device, and why: a registry of dotted names, imported when first used.

A CPU has two sets: the compiled kernels for one of its instruction sets, and plain torch. The first is taken where it
can be; a flag decides otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.cpu import native

_REFERENCE = {
    "rms_norm": "kernels.reference.rms_norm",
    "fused_add_rms_norm": "kernels.reference.fused_add_rms_norm",
    "rotary_embedding": "kernels.reference.rotary_embedding",
    "silu_and_mul": "kernels.reference.silu_and_mul",
    "write_kv": "kernels.reference_attention.write_kv",
    "paged_attention": "kernels.reference_attention.paged_attention",
    "copy_blocks": "kernels.reference.copy_blocks",
    "top_k": "kernels.reference.top_k",
    "want_huge_pages": "kernels.reference.want_huge_pages",
    "pack_weight": "kernels.packed_linear.pack_weight",
}
_NATIVE = _REFERENCE | {
    "rms_norm": "kernels.cpu.ops.rms_norm",
    "fused_add_rms_norm": "kernels.cpu.ops.fused_add_rms_norm",
    "rotary_embedding": "kernels.cpu.ops.rotary_embedding",
    "silu_and_mul": "kernels.cpu.ops.silu_and_mul",
    "write_kv": "kernels.cpu.ops.write_kv",
    "paged_attention": "kernels.cpu.ops.paged_attention",
    "top_k": "kernels.cpu.ops.top_k",
    "want_huge_pages": "kernels.cpu.ops.want_huge_pages",
    "pack_weight": "kernels.cpu.ops.pack_weight",
    "fuse_layer": "kernels.cpu.layer.fuse_layer",
}

REFERENCE = "reference"
AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """name: an instruction set or `reference`. why: for people."""

    name: str
    why: str


class _Chosen:
    """What this process computes with; decided at the first use, or by `use_cpu_kernels`."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self.functions: dict[str, Callable[..., Any]] = {}


_chosen = _Chosen()


def use_cpu_kernels(wanted: str = AUTO, *, num_threads: int = 1, is_exact: bool = False) -> Choice:
    """Decides for this process; what was packed before stays with the kernels that packed it.

    wanted: auto, reference, or an instruction set. is_exact: activations are never rounded to a weight's format.
    Raises NativeKernelsError when an instruction set is wanted that this CPU or this build does not have.
    """
    sets = native.instruction_sets()
    if wanted == REFERENCE or (wanted == AUTO and not sets):
        why = "as the flag says" if wanted == REFERENCE else native.why_missing()
        choice = Choice(REFERENCE, why)
    else:
        name = sets[0] if wanted == AUTO else wanted
        native.configure(name, num_threads, is_exact=is_exact)
        choice = Choice(name, "the best that this CPU runs" if wanted == AUTO else "as the flag says")
    _chosen.choice = choice
    _chosen.functions.clear()
    return choice


def cpu_choice() -> Choice:
    return _chosen.choice or use_cpu_kernels()


def _table(device_type: str) -> dict[str, str]:
    if device_type != "cpu":
        raise LookupError(f"no kernels for device {device_type!r}, there are kernels for ['cpu']")
    return _REFERENCE if cpu_choice().name == REFERENCE else _NATIVE


def implementation(op: str, device_type: str) -> Callable[..., Any]:
    """The function that serves `op` on this kind of device. Raises LookupError naming what there is."""
    found = _chosen.functions.get(op) if device_type == "cpu" else None
    if found is not None:
        return found
    table = _table(device_type)
    if op not in table:
        raise LookupError(f"no kernel {op!r} for device {device_type!r}, there are {sorted(table)}")
    module, _, name = table[op].rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if device_type == "cpu":
        _chosen.functions[op] = function
    return function


def has(op: str, device_type: str) -> bool:
    return op in _table(device_type)


def picked(device_type: str) -> dict[str, str]:
    """What serves each op, for `tandem env`."""
    return dict(_table(device_type))
