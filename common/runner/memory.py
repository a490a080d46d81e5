"""How much memory the KV pool may take: what the process may use, less what the rest of the machine needs.

On a CPU the pool shares the machine with other nodes and the page cache, so the default is a modest share.
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.errors import ConfigError
from common.kv_layout import KVLayout

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.1
MAX_DEFAULT_BYTES = 4 << 30
_NULL_BLOCKS = 1


def num_blocks_that_fit(layout: KVLayout, memory_bytes: int | None, *, max_model_len: int) -> int:
    """Blocks of the pool, the null block included. memory_bytes: the flag; None takes a share of what is free, and as
    much as one request of max_model_len needs. Raises ConfigError with the numbers when the memory is too little."""
    needed = layout.num_blocks_for(max_model_len) + _NULL_BLOCKS
    free = available_bytes()
    if memory_bytes is None:
        budget = min(int(free * DEFAULT_SHARE), MAX_DEFAULT_BYTES)
        budget = max(budget, needed * layout.block_bytes)
    else:
        budget = memory_bytes
    if budget > free:
        raise ConfigError(
            f"the KV pool needs {_gib(budget)} and {_gib(free)} are free; lower --max-model-len ({max_model_len})"
            " or --kv-cache-memory-bytes"
        )
    num_blocks = budget // layout.block_bytes
    if num_blocks < 1 + _NULL_BLOCKS:
        raise ConfigError(f"the KV pool of {budget} bytes holds no block of {layout.block_bytes} bytes")
    log.info("KV memory: %s of %s free, %d bytes a block", _gib(budget), _gib(free), layout.block_bytes)
    return num_blocks


def available_bytes() -> int:
    """Memory that this process can still take: the least of the machine's and its control group's."""
    found = [_available_of_machine()]
    if (group := _available_of_group()) is not None:
        found.append(group)
    return max(0, min(found))


def _available_of_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _available_of_group() -> int | None:
    """Room under the control group's limit (version 2), None when there is none."""
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text().strip()
        return None if text == "max" else int(text) - int(current.read_text())
    except (OSError, ValueError):
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
