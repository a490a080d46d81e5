"""What the system says about memory, on made-up /proc and control group trees, and on the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.runner.process_memory import ProcessMemory

MIB = 2**20
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class Machine:
    """A machine of 1000 MiB, 800 of them free, and a process on it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal: {1000 * 1024} kB\nMemAvailable: {800 * 1024} kB\nHugePages_Total: 0\n"
        )
        self.set_status(VmHWM=300, VmRSS=200, RssAnon=150)
        self.memory = ProcessMemory(self.proc, self.groups)

    def set_status(self, **mib: int) -> None:
        lines = ["Name:\tpython 3 kB", *(f"{name}:\t{size * 1024} kB" for name, size in mib.items())]
        (self.proc / "self" / "status").write_text("\n".join(lines))

    def be_in(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines))

    def add_group(self, path: str, version: int, limit: object, used: int = 0, inactive: int = 0) -> None:
        """Sizes in bytes."""
        directory = self.groups / path
        directory.mkdir(parents=True, exist_ok=True)
        limit_name, usage_name, inactive_name = _FILES[version]
        (directory / limit_name).write_text(f"{limit}\n")
        (directory / usage_name).write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"cache 7\n{inactive_name} {inactive}\n")

    @property
    def limit_mib(self) -> float:
        return self.memory.limit().num_bytes / MIB

    @property
    def free_mib(self) -> float:
        return self.memory.free().num_bytes / MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_the_machine_is_the_limit(machine: Machine) -> None:
    assert machine.limit_mib == 1000
    assert machine.memory.limit().source == "all of this machine"
    assert machine.free_mib == 800


def test_a_system_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say MemTotal"):
        ProcessMemory(tmp_path, tmp_path).limit()


@pytest.mark.parametrize("limited", ["a/b/c", "a/b", "a"])
def test_version_2_any_group_up_to_the_root_limits(machine: Machine, limited: str) -> None:
    machine.be_in("0::/a/b/c")
    for path in ("a/b/c", "a/b", "a"):
        machine.add_group(path, 2, 600 * MIB if path == limited else "max", 500 * MIB, 50 * MIB)
    assert machine.limit_mib == 600
    assert machine.memory.limit().source.endswith(f"cgroup/{limited}")
    assert machine.free_mib == 600 - 450  # inactive page cache is as good as free


def test_version_2_the_lowest_limit_counts_and_so_does_the_fullest_group(machine: Machine) -> None:
    machine.be_in("0::/a/b")
    machine.add_group("a/b", 2, 300 * MIB, 10 * MIB)
    machine.add_group("a", 2, 600 * MIB, 590 * MIB)
    assert machine.limit_mib == 300
    assert machine.free_mib == 10


def test_version_2_below_unified_beside_version_1(machine: Machine) -> None:
    machine.be_in("4:memory:/v1", "3:cpu,cpuacct:/v1", "0::/v2")
    machine.add_group("memory/v1", 1, 2**63 - 4096, 100)
    machine.add_group("unified/v2", 2, 200 * MIB)
    assert machine.limit_mib == 200
    assert machine.memory.limit().source.endswith("unified/v2")


def test_version_1(machine: Machine) -> None:
    machine.be_in("9:name=systemd:/elsewhere", "4:cpu,memory:/a/b")
    machine.add_group("memory/a/b", 1, 2**63 - 4096, 300 * MIB)
    machine.add_group("memory/a", 1, 500 * MIB, 300 * MIB, 100 * MIB)
    assert machine.limit_mib == 500
    assert machine.free_mib == 300


@pytest.mark.parametrize("path", ["/docker/0123", "/../../other", "/"])
def test_inside_a_container_the_root_is_its_own_group(machine: Machine, path: str) -> None:
    """Its path in the host's tree is not there to be seen."""
    machine.be_in(f"0::{path}")
    machine.add_group("", 2, 400 * MIB, 100 * MIB)
    assert machine.limit_mib == 400
    assert machine.free_mib == 300


def test_a_group_over_its_limit_has_nothing_free(machine: Machine) -> None:
    machine.be_in("0::/a")
    machine.add_group("a", 2, 100 * MIB, 120 * MIB)
    assert machine.free_mib == 0


def test_a_groups_limit_above_the_machine_is_none(machine: Machine) -> None:
    machine.be_in("0::/a")
    machine.add_group("a", 2, 5000 * MIB, 10 * MIB)
    assert machine.limit_mib == 1000
    assert machine.free_mib == 800


def test_held_is_private_memory_where_the_system_tells_it_apart(machine: Machine) -> None:
    assert machine.memory.held_bytes() == 150 * MIB
    machine.set_status(VmRSS=200)
    assert machine.memory.held_bytes() == 200 * MIB


def test_a_peak_is_measured_from_a_mark_that_was_reset(machine: Machine) -> None:
    clear_refs = machine.proc / "self" / "clear_refs"
    clear_refs.touch()

    def run() -> None:
        assert clear_refs.read_text() == "5"
        machine.set_status(VmHWM=270, VmRSS=210)

    peak = machine.memory.measure_peak(run)
    assert peak.is_exact
    assert peak.num_bytes == 70 * MIB


def test_a_mark_that_cannot_be_reset_gives_an_upper_bound(machine: Machine) -> None:
    (machine.proc / "self" / "clear_refs").mkdir()  # cannot be written, whoever asks
    peak = machine.memory.measure_peak(lambda: machine.set_status(VmHWM=300, VmRSS=205))
    assert not peak.is_exact
    assert peak.num_bytes == 100 * MIB


def test_the_real_process_holds_what_it_takes() -> None:
    memory = ProcessMemory()
    assert 0 < memory.free().num_bytes <= memory.limit().num_bytes
    before = memory.held_bytes()
    taken = torch.ones(64 * MIB, dtype=torch.uint8)
    assert memory.held_bytes() - before > 56 * MIB
    del taken
    assert memory.held_bytes() - before < 32 * MIB


def test_the_real_peak_is_seen_though_the_memory_is_given_back() -> None:
    memory = ProcessMemory()
    small = memory.measure_peak(lambda: None)
    large = memory.measure_peak(lambda: torch.ones(128 * MIB, dtype=torch.uint8).sum().item())
    assert large.num_bytes > 120 * MIB
    assert not small.is_exact or small.num_bytes < 32 * MIB  # an older, higher peak is forgotten where the mark resets


def test_a_limit_counts_though_its_usage_cannot_be_read(machine: Machine) -> None:
    machine.be_in("0::/pod")
    machine.add_group("pod", 2, 500 * MIB, used=400 * MIB)
    directory = next(machine.groups.rglob("memory.current")).parent
    (directory / "memory.current").unlink()
    (directory / "memory.stat").unlink()
    assert machine.limit_mib == 500
    assert machine.free_mib == 500


def test_a_soft_limit_counts_too(machine: Machine) -> None:
    machine.be_in("0::/pod")
    machine.add_group("pod", 2, "max", used=400 * MIB)
    directory = next(machine.groups.rglob("memory.current")).parent
    (directory / "memory.high").write_text(f"{900 * MIB}\n")
    assert machine.limit_mib == 900
    assert machine.free_mib == 500


def test_odd_lines_are_passed_over(machine: Machine) -> None:
    machine.be_in("", "nonsense", "0::", "0::relative", "0::/pod")
    machine.add_group("pod", 2, 1000 * MIB)
    directory = next(machine.groups.rglob("memory.stat")).parent
    (directory / "memory.stat").write_text("inactive_file\nx y z\n\n")
    assert machine.limit_mib == 1000
    (directory / "memory.max").write_text("")
    assert machine.limit_mib == machine.memory.limit().num_bytes / MIB
