"""How many cores this process may use: those it may run on, as far as the quotas of its control groups pay for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from common.control_groups import CONTROL_GROUPS, PROC, group_directories, read_words


def usable_cores(proc: Path = PROC, control_groups: Path = CONTROL_GROUPS) -> int:
    """At least one. A quota of one and a half cores counts two: with one thread half a core would lie idle."""
    cores = [len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(proc, control_groups))]
    return max(1, min(cores))


def _quotas(proc: Path, control_groups: Path) -> Iterator[float]:
    """In cores, of each group that has one."""
    for version, directory in group_directories("cpu", proc, control_groups):
        if version == 2:
            words = read_words(directory / "cpu.max")  # "150000 100000", or "max 100000"
        else:
            words = read_words(directory / "cpu.cfs_quota_us") + read_words(directory / "cpu.cfs_period_us")  # or -1
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            yield int(words[0]) / int(words[1])
