"""How many KV blocks an engine gets: a sum over numbers that others measured.

    pool = memory that this process may use x its share - what it held before - weights - worst step - host pool

and never more than is free. On a CPU the host pool comes out of the same memory: an eighth of what is left, unless a
flag says how much. A flag may give the pool's size instead; then it only has to be free. Reads nothing itself; refuses
with the numbers and what to change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from common.config import EngineFlags
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.runner.process_memory import Bound, Peak
from common.scheduling.config import SchedulerConfig

_NULL_BLOCKS = 1
_DEFAULT_SWAP_PART = 8


@dataclass(frozen=True)
class MemoryUse:
    """What was measured. limit: memory that the process may use in total. free: what it can still take, its weights
    loaded. process_bytes: what it held before it loaded them. peak: of the worst step, None when it was not run."""

    limit: Bound
    free: Bound
    process_bytes: int
    weight_bytes: int
    peak: Peak | None


@dataclass(frozen=True)
class PoolPlan:
    """num_blocks: of the pool, the null block included. lines: the sum, for people."""

    layout: KVLayout
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    lines: tuple[str, ...]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - _NULL_BLOCKS

    @property
    def capacity_tokens(self) -> int:
        return self.num_usable * self.layout.block_size

    @property
    def num_full_length(self) -> float:
        """How many requests of max_model_len fit at once."""
        return self.num_usable / self.layout.num_blocks_for(self.max_model_len)


def has_given_size(flags: EngineFlags) -> bool:
    """A flag says how large the pool is, so that nothing needs to be measured."""
    return flags.num_gpu_blocks_override is not None or flags.kv_cache_memory_bytes is not None


def check_memory_flags(flags: EngineFlags, limits: SchedulerConfig) -> None:
    """What needs no measurement. Raises ConfigError for flags that do not go together."""
    if flags.num_gpu_blocks_override is not None and flags.kv_cache_memory_bytes is not None:
        raise ConfigError("--num-gpu-blocks-override and --kv-cache-memory-bytes are both given, one is enough")
    if limits.preemption_mode == "swap" and not (has_given_size(flags) and flags.swap_space is None):
        return  # a default host pool may still turn out empty; the scheduler refuses that
    if limits.preemption_mode == "swap":
        raise ConfigError(
            "--preemption-mode swap needs host memory, and beside a pool whose size was given there is none by default;"
            " give --swap-space too, such as 1GiB"
        )


def describe_worst_step(limits: SchedulerConfig) -> str:
    return (
        f"{limits.max_num_batched_tokens} tokens of {limits.max_num_running} requests, context {limits.max_model_len}"
    )


def plan_pool(
    use: MemoryUse, layout: KVLayout, flags: EngineFlags, limits: SchedulerConfig, *, with_head: bool
) -> PoolPlan:
    """Raises ConfigError when the memory is too little.

    with_head: False for a node that only computes prompts: it preempts nobody and needs no host pool.
    """
    swap_space = flags.swap_space if with_head else 0
    if use.peak is None:
        num_host_blocks = _num_host_blocks(layout, swap_space or 0)
        swap_bytes = num_host_blocks * layout.block_bytes
        num_blocks, lines = _given(use, layout, flags, limits.max_model_len, swap_bytes)
    else:
        measured = _Sum(use, use.peak, layout, limits, flags.cpu_memory_utilization, swap_bytes=0)
        if swap_space is None:
            swap_space = measured.default_swap_space
        num_host_blocks = _num_host_blocks(layout, swap_space)
        measured = replace(measured, swap_bytes=num_host_blocks * layout.block_bytes)
        if measured.missing_bytes > 0:
            raise ConfigError(measured.refusal())
        num_blocks, lines = measured.kv_bytes // layout.block_bytes, measured.lines()
    return PoolPlan(layout, limits.max_model_len, num_blocks, num_host_blocks, lines)


def _num_host_blocks(layout: KVLayout, swap_space: int) -> int:
    if 0 < swap_space < layout.block_bytes:
        raise ConfigError(f"--swap-space is {swap_space} bytes, less than one KV block of {layout.block_bytes}")
    return swap_space // layout.block_bytes


def _bytes_of_one_request(layout: KVLayout, max_model_len: int) -> int:
    """Of the smallest pool that holds a request of full length."""
    return (layout.num_blocks_for(max_model_len) + _NULL_BLOCKS) * layout.block_bytes


def _fitting_len(layout: KVLayout, kv_bytes: int) -> int:
    """The longest request that a pool of so many bytes holds."""
    return max(kv_bytes // layout.block_bytes - _NULL_BLOCKS, 0) * layout.block_size


# --- a size that was given ------------------------------------------------------------------------------------------


def _given(
    use: MemoryUse, layout: KVLayout, flags: EngineFlags, max_model_len: int, swap_bytes: int
) -> tuple[int, tuple[str, ...]]:
    if flags.num_gpu_blocks_override is not None:
        flag, num_blocks = "--num-gpu-blocks-override", flags.num_gpu_blocks_override
    else:
        assert flags.kv_cache_memory_bytes is not None
        flag, num_blocks = "--kv-cache-memory-bytes", flags.kv_cache_memory_bytes // layout.block_bytes
    kv_bytes = num_blocks * layout.block_bytes
    if kv_bytes + swap_bytes > use.free.num_bytes:
        swap = f" beside {mib(swap_bytes)} of --swap-space" if swap_bytes else ""
        raise ConfigError(
            f"{flag} asks for {mib(kv_bytes)} of KV blocks{swap}, but {mib(use.free.num_bytes)} are free"
            f" ({use.free.source}); give less"
        )
    if flags.kv_cache_memory_bytes is not None:
        _check_holds_one_request(layout, flags.kv_cache_memory_bytes, max_model_len)
    lines = (
        _line("", use.limit.num_bytes, f"memory that this process may use ({use.limit.source})"),
        _line("", use.free.num_bytes, f"free now, with the weights loaded ({use.free.source})"),
        _line("-", swap_bytes, "host pool for preempted requests (--swap-space)"),
        _line("-", kv_bytes, f"KV blocks, given by {flag}"),
        _line("=", use.free.num_bytes - swap_bytes - kv_bytes, "left for steps (not measured) and for others"),
    )
    return num_blocks, lines


def _check_holds_one_request(layout: KVLayout, kv_bytes: int, max_model_len: int) -> None:
    needed_bytes = _bytes_of_one_request(layout, max_model_len)
    if kv_bytes < needed_bytes:
        fitting = _fitting_len(layout, kv_bytes)
        shorter = f" or lower --max-model-len to {fitting}" if fitting else ""
        raise ConfigError(
            f"--kv-cache-memory-bytes is {mib(kv_bytes)}, the KV blocks of one request of {max_model_len} tokens need"
            f" {mib(needed_bytes)}; raise it{shorter}"
        )


# --- a size that memory decides -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    use: MemoryUse
    peak: Peak
    layout: KVLayout
    limits: SchedulerConfig
    utilization: float
    swap_bytes: int

    @property
    def share_bytes(self) -> int:
        return round(self.use.limit.num_bytes * self.utilization)

    @property
    def taken_bytes(self) -> int:
        """By all but KV blocks."""
        return self.use.process_bytes + self.use.weight_bytes + self.peak.num_bytes + self.swap_bytes

    @property
    def left_of_share(self) -> int:
        return self.share_bytes - self.taken_bytes

    @property
    def left_of_free(self) -> int:
        """Process and weights are not part of what is free."""
        return self.use.free.num_bytes - self.peak.num_bytes - self.swap_bytes

    @property
    def is_bound_by_free(self) -> bool:
        return self.left_of_free < self.left_of_share

    @property
    def kv_bytes(self) -> int:
        return max(min(self.left_of_share, self.left_of_free), 0)

    @property
    def request_bytes(self) -> int:
        return _bytes_of_one_request(self.layout, self.limits.max_model_len)

    @property
    def default_swap_space(self) -> int:
        """Of the sum without any: an eighth, in whole blocks, and never what one request of full length needs."""
        spare_bytes = min(self.kv_bytes // _DEFAULT_SWAP_PART, self.kv_bytes - self.request_bytes)
        return max(spare_bytes, 0) // self.layout.block_bytes * self.layout.block_bytes

    @property
    def missing_bytes(self) -> int:
        """Until one request of full length fits; not above 0 when one does."""
        return self.request_bytes - min(self.left_of_share, self.left_of_free)

    def lines(self) -> tuple[str, ...]:
        use, limits, free = self.use, self.limits, self.use.free
        how = "measured" if self.peak.is_exact else "at most (this system keeps the peak of loading)"
        may_use = f"memory that this process may use ({use.limit.source})"
        if self.is_bound_by_free:
            first = [
                _line("", use.limit.num_bytes, f"{may_use}; less than its share of {self.utilization:g} is free:"),
                _line("=", free.num_bytes, f"free with the weights loaded ({free.source})"),
            ]
        else:
            first = [
                _line("", use.limit.num_bytes, may_use),
                f"x {self.utilization:>14g}  its share (--cpu-memory-utilization)",
                _line("=", self.share_bytes, "of this process"),
                _line("-", use.process_bytes, "the process without a model"),
                _line("-", use.weight_bytes, "weights"),
            ]
        return (
            *first,
            _line("-", self.peak.num_bytes, f"worst step, {how}: {describe_worst_step(limits)}"),
            _line("-", self.swap_bytes, "host pool for preempted requests (--swap-space)"),
            _line("=", self.kv_bytes, "KV blocks"),
        )

    def refusal(self) -> str:
        use, free = self.use, self.use.free
        if self.is_bound_by_free:
            memory = f"{mib(free.num_bytes)} that are free with the weights loaded ({free.source})"
            taken = ""
        else:
            memory = (
                f"{mib(self.share_bytes)} (--cpu-memory-utilization {self.utilization:g} of"
                f" {mib(use.limit.num_bytes)}, {use.limit.source})"
            )
            taken = f"{mib(use.process_bytes)} for the process, {mib(use.weight_bytes)} for weights, "
        swap = f", {mib(self.swap_bytes)} for --swap-space" if self.swap_bytes else ""
        return (
            f"too little memory: KV blocks of one request of {self.limits.max_model_len} tokens need"
            f" {mib(self.request_bytes)}, and {mib(self.kv_bytes)} are left of {memory} after {taken}"
            f"{mib(self.peak.num_bytes)} for the worst step{swap}; {', or '.join(self._advice())}"
        )

    def _advice(self) -> list[str]:
        """What would help, each by itself."""
        found = []
        limit_bytes = max(self.use.limit.num_bytes, 1)
        needed_share = math.ceil((self.taken_bytes + self.request_bytes) / limit_bytes * 100) / 100
        if self.left_of_free >= self.request_bytes and needed_share <= 1:
            found.append(f"raise --cpu-memory-utilization to {needed_share:g}")
            found.append(f"give --kv-cache-memory-bytes, at least {math.ceil(self.request_bytes / 2**20)}MiB")
        if fitting := _fitting_len(self.layout, self.kv_bytes):
            found.append(f"lower --max-model-len to {fitting}")
        if self.peak.num_bytes > self.missing_bytes:
            limits = self.limits
            found.append(f"lower --max-num-batched-tokens ({limits.max_num_batched_tokens})")
            found.append(f"lower --max-num-seqs ({limits.max_num_running})")
        if self.swap_bytes:
            found.append("lower --swap-space")
        if self.is_bound_by_free:
            found.append("end other processes")
        return found or ["give this process more memory"]


# --- text -----------------------------------------------------------------------------------------------------------


def mib(num_bytes: int) -> str:
    if 0 < num_bytes < 2**20 // 10:  # would be rounded to nothing
        return f"{num_bytes} B"
    return f"{num_bytes / 2**20:,.1f} MiB"


def _line(sign: str, num_bytes: int, what: str) -> str:
    """In one unit, one below the other, so that the sum can be checked by eye."""
    return f"{sign:1} {mib(num_bytes):>14}  {what}"
