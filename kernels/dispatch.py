"""Which implementation serves an op on a device: a registry of dotted names, imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

_IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "cpu": {
        "rms_norm": "kernels.reference.rms_norm",
        "fused_add_rms_norm": "kernels.reference.fused_add_rms_norm",
        "rotary_embedding": "kernels.reference.rotary_embedding",
        "silu_and_mul": "kernels.reference.silu_and_mul",
        "write_kv": "kernels.reference.write_kv",
        "paged_attention": "kernels.reference.paged_attention",
        "copy_blocks": "kernels.reference.copy_blocks",
        "pack_weight": "kernels.packed_linear.pack_weight",
        "linear": "kernels.packed_linear.linear",
    },
}


@cache
def implementation(op: str, device_type: str) -> Callable[..., Any]:
    """The function that serves `op` on this kind of device. Raises LookupError naming what there is."""
    table = _IMPLEMENTATIONS.get(device_type)
    if table is None:
        raise LookupError(f"no kernels for device {device_type!r}, there are kernels for {sorted(_IMPLEMENTATIONS)}")
    if op not in table:
        raise LookupError(f"no kernel {op!r} for device {device_type!r}, there are {sorted(table)}")
    module, _, name = table[op].rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def picked(device_type: str) -> dict[str, str]:
    """What serves each op, for `tandem env`."""
    return dict(_IMPLEMENTATIONS.get(device_type, {}))
