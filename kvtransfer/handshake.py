"""Compares two HELLOs: what must be equal for two ends to exchange blocks. Knows no state."""

from __future__ import annotations

from kvtransfer.frames import Hello
from kvtransfer.session import FailCode


def mismatch(own: Hello, other: Hello, *, ours: str, theirs: str) -> tuple[FailCode, str] | None:
    """Why these two cannot work together, with both sides' values; None when they can."""
    if own.version != other.version:
        return FailCode.VERSION_MISMATCH, f"fetch protocol: {ours} has {own.version}, {theirs} has {other.version}"
    if own.layout != other.layout:
        text = f"KV layout: {ours} has {own.layout.describe()[:2048]}; {theirs} has {other.layout.describe()[:2048]}"
        return FailCode.LAYOUT_MISMATCH, text
    if own.num_layer_groups != other.num_layer_groups:
        text = f"layer groups: {ours} has {own.num_layer_groups}, {theirs} has {other.num_layer_groups}"
        return FailCode.LAYOUT_MISMATCH, text
    return None
