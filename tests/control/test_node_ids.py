"""Ids of nodes: which host it is, and no two the same."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import Id, new_node_id


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("4f0d78a7c3e2", "4f0d78a7c3e2-"),
        ("gpu-7.rack.example.org", "gpu-7-"),
        ("my_host\n", "my-host-"),
        ("x" * 64, "x" * 40 + "-"),
        ("", ""),
        ("\u00fc", ""),
    ],
)
def test_the_host_stands_in_front(host: str, start: str) -> None:
    ids = {new_node_id(host) for _ in range(50)}
    assert len(ids) == 50
    for node_id in ids:
        assert node_id.removeprefix(start).isalnum()
        assert node_id.startswith(start)
        assert msgspec.convert(node_id, Id) == node_id
