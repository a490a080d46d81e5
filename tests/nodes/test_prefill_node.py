"""A prefill node towards its proxies: what it does with the messages that concern it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common import messages as m
from prefill_node.node import PrefillNode


def test_messages_drain_it_and_reset_its_prefix_cache() -> None:
    store: Any = SimpleNamespace(is_draining=False, num_open=0)
    resets: list[int] = []
    node = PrefillNode(
        store,
        stats=lambda: m.NodeStats(num_running=3),
        hello=lambda stats, live: SimpleNamespace(stats=stats, live=live),
        reset_prefix_cache=lambda: resets.append(1),
    )
    node.received("proxy", m.ResetPrefixCache())
    assert resets == [1]
    assert not node.status().is_draining
    node.received("proxy", m.Drain())
    assert node.status() == m.Status(stats=m.NodeStats(num_running=3), is_draining=True)
    assert resets == [1]
