"""As many file descriptors as there may be, and a word before they run out."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.descriptors import MAX_WANTED, DescriptorWatch, raise_descriptor_limit


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """Of this process, whose limits are as before afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lowest_free() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_is_raised_as_far_as_it_may(hard_limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    raise_descriptor_limit()
    assert limit() == min(hard_limit, MAX_WANTED) > 256


def test_a_limit_is_never_lowered(hard_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.descriptors.MAX_WANTED", 128)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    raise_descriptor_limit()
    assert limit() == 256


def test_a_node_raises_its_limit_as_far_as_a_low_hard_one_allows() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "from common.config import NodeFlags; from common.node_process import run_node_process\n"
        "async def run(flags): print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "run_node_process(NodeFlags, 'decode', run)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "(200, 200)\n"


def test_nothing_is_said_while_there_are_enough(caplog: pytest.LogCaptureFixture, hard_limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest_free() + 10, hard_limit))
    DescriptorWatch().look()
    assert not caplog.records


@pytest.mark.parametrize("num_left", [0, 1])
def test_when_they_are_nearly_used_up_it_is_said_once(
    caplog: pytest.LogCaptureFixture, hard_limit: int, num_left: int
) -> None:
    limit = lowest_free() + num_left
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    watch = DescriptorWatch()
    watch.look()
    watch.look()
    [record] = caplog.records
    assert f"nearly all of the {limit} file descriptors" in record.message
    assert "ulimit -n" in record.message
