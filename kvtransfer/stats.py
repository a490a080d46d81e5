"""Counters of one end of the fetch plane, for a node to export. Written by one thread, read by any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

COMPLETE = "complete"


@dataclass
class TransferStats:
    """fetches: ended ones by outcome ("complete", or the code it failed with). dropped_frames: by reason."""

    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    fetches: Counter[str] = field(default_factory=Counter)
    dropped_frames: Counter[str] = field(default_factory=Counter)
