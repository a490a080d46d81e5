"""What the operating system says about memory: how much this process may use, what is free, what it holds, its peak.

Linux: /proc, and control groups. Knows no model and no pool.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.control_groups import CONTROL_GROUPS, PROC, group_directories, read_words
from common.errors import ConfigError

_RESET_HIGH_WATER_MARK = "5"  # proc(5), /proc/pid/clear_refs


@dataclass(frozen=True)
class Bound:
    """source: who sets it, for people."""

    num_bytes: int
    source: str


@dataclass(frozen=True)
class Peak:
    """is_exact: False when the true peak may be less: an older high-water mark could not be told from the new one."""

    num_bytes: int
    is_exact: bool


class ProcessMemory:
    """proc, control_groups: where these file systems are mounted."""

    def __init__(self, proc: Path = PROC, control_groups: Path = CONTROL_GROUPS) -> None:
        self._proc = proc
        self._control_groups = control_groups

    def limit(self) -> Bound:
        """What this process may use in total, alone on its machine. Raises ConfigError when nobody says it."""
        bounds = [Bound(self._of_machine("MemTotal"), "all of this machine")]
        bounds += [Bound(group.limit_bytes, group.name) for group in self._groups()]
        return min(bounds, key=lambda bound: bound.num_bytes)

    def free(self) -> Bound:
        """What it can still take now. Raises ConfigError when nobody says it."""
        bounds = [Bound(self._of_machine("MemAvailable"), "this machine")]
        bounds += [Bound(max(group.limit_bytes - group.used_bytes, 0), group.name) for group in self._groups()]
        return min(bounds, key=lambda bound: bound.num_bytes)

    def held_bytes(self) -> int:
        """Private memory of this process; what its heap has freed is given back first."""
        _release_freed_heap()
        status = self._status()
        return status.get("RssAnon", status["VmRSS"])

    def measure_peak(self, run: Callable[[], None]) -> Peak:
        """How far the process's resident memory grows while `run` runs, above what it was before; given back then."""
        _release_freed_heap()
        before = self._status()["VmRSS"]
        is_exact = self._reset_high_water_mark()
        run()
        peak = max(self._high_water_mark() - before, 0)
        _release_freed_heap()
        return Peak(peak, is_exact)

    # --- /proc ------------------------------------------------------------------------------------------------------

    def _of_machine(self, name: str) -> int:
        try:
            return _sizes(self._proc / "meminfo")[name]
        except (OSError, KeyError):
            raise ConfigError(f"{self._proc / 'meminfo'} does not say {name}: this needs Linux") from None

    def _status(self) -> dict[str, int]:
        return _sizes(self._proc / "self" / "status")

    def _high_water_mark(self) -> int:
        usage_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._status().get("VmHWM", usage_bytes)  # some sandboxes' kernels leave VmHWM out

    def _reset_high_water_mark(self) -> bool:
        try:
            (self._proc / "self" / "clear_refs").write_text(_RESET_HIGH_WATER_MARK)
        except OSError:
            return False
        return True

    # --- control groups ---------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[_Group]:
        """Those on the process's path that have a limit."""
        for version, directory in group_directories("memory", self._proc, self._control_groups):
            if (group := _FILES[version].read(directory)) is not None:
                yield group


@dataclass(frozen=True)
class _Group:
    name: str
    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class _GroupFiles:
    """Their names in a version of control groups. inactive_file: key of memory.stat, page cache that the kernel drops
    before it refuses memory."""

    limits: tuple[str, ...]
    usage: str
    inactive_file: str

    def read(self, directory: Path) -> _Group | None:
        """None without a limit, and where there is no such group. A limit counts though its usage cannot be read."""
        limits = [limit for name in self.limits if (limit := _number(directory / name)) is not None]
        if not limits:
            return None
        usage = _number(directory / self.usage) or 0
        return _Group(f"control group {directory}", min(limits), max(usage - self._evictable(directory), 0))

    def _evictable(self, directory: Path) -> int:
        try:
            lines = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        except OSError:
            return 0
        return sum(int(words[1]) for words in lines if words[:1] == [self.inactive_file] and words[1:2] != [])


_FILES = {
    1: _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def _number(file: Path) -> int | None:
    """None where there is no such file, or no number in it: `max`."""
    text = "".join(read_words(file))
    return int(text) if text.isdecimal() else None


def _sizes(file: Path) -> dict[str, int]:
    """Bytes by name, of lines such as `VmRSS:    1234 kB`."""
    lines = (line.split() for line in file.read_text(errors="replace").splitlines())
    sizes = (words for words in lines if len(words) == 3 and words[2] == "kB" and words[1].isdecimal())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in sizes}


def _release_freed_heap() -> None:
    """Else memory that was freed while loading would hide what a step takes (glibc keeps it; others have no such
    function)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
