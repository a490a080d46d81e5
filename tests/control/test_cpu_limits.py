"""Cores that a process may use, on made-up /proc and control group trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.config import EngineFlags
from common.cpu_limits import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


class Machine:
    def __init__(self, root: Path, *memberships: str) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("\n".join(memberships))

    def write(self, path: str, text: str) -> None:
        file = self.groups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    @property
    def cores(self) -> int:
        return usable_cores(self.proc, self.groups)


def test_without_a_quota_those_it_may_run_on(tmp_path: Path) -> None:
    assert Machine(tmp_path).cores == 8
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("50000 25000", 2),
        ("9900000 100000", 8),
        ("0 100000", 8),
        ("100000 0", 8),
        ("", 8),
        ("many of them", 8),
    ],
)
def test_version_2_the_quota_bounds_them_rounded_up(tmp_path: Path, text: str, cores: int) -> None:
    machine = Machine(tmp_path, "0::/a/b")
    machine.write("a/b/cpu.max", text)
    assert machine.cores == cores


def test_version_2_the_tightest_group_up_to_the_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a/b")
    machine.write("a/b/cpu.max", "600000 100000")
    machine.write("a/cpu.max", "300000 100000")
    assert machine.cores == 3


@pytest.mark.parametrize("path", ["/docker/0123", "/../../other"])
def test_inside_a_container_the_root_is_its_own_group(tmp_path: Path, path: str) -> None:
    machine = Machine(tmp_path, f"0::{path}")
    machine.write("cpu.max", "200000 100000")
    assert machine.cores == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, mount: str, quota: str, cores: int) -> None:
    machine = Machine(tmp_path, "5:memory:/m", "4:cpu,cpuacct:/a", "1:cpuset:/a")
    machine.write(f"{mount}/a/cpu.cfs_quota_us", quota)
    machine.write(f"{mount}/a/cpu.cfs_period_us", "100000")
    machine.write("cpuset/a/cpu.max", "100000 100000")  # no quota of the controller that counts
    assert machine.cores == cores


def test_a_node_takes_half_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.config.usable_cores", lambda: 6)
    assert EngineFlags().resolved_num_threads == 3
