"""Where a request goes: the decode node, and the prefill nodes that its KV is fetched from, best first. Pure.

The decode node with room and the least load wins; prefill nodes are listed by load. A prompt shorter than
`min_split_tokens` is not worth a transfer: its decode node computes it itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.messages import Source
from proxy.node_pool import Node

MAX_SOURCES = 16


@dataclass(frozen=True)
class Need:
    """What is to be placed. num_tokens: prompt and the longest choice's outputs so far.

    num_sequences: how many it may run at once. avoid: nodes that failed this request before.
    """

    num_tokens: int
    num_sequences: int = 1
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Route:
    """`sources` are snapshots: those nodes may be gone when the decode node dials them."""

    decode_node: Node
    sources: tuple[Source, ...]


def choose_route(nodes: Iterable[Node], need: Need, *, min_split_tokens: int) -> Route | None:
    """The best route now, or None when no decode node has room."""
    nodes = list(nodes)
    candidates = [node for node in nodes if node.role == "decode" and node.has_room(need.num_sequences)]
    if not candidates:
        return None
    best = min(candidates, key=lambda node: (node.instance_id in need.avoid, *_load(node)))
    return Route(best, _choose_sources(nodes, need, min_split_tokens))


def _choose_sources(nodes: list[Node], need: Need, min_split_tokens: int) -> tuple[Source, ...]:
    if need.num_tokens < min_split_tokens:
        return ()
    able = [node for node in nodes if node.role == "prefill" and node.takes_work and node.hello.fetch_endpoints]
    return tuple(node.source for node in sorted(able, key=_load)[:MAX_SOURCES])


def _load(node: Node) -> tuple[int, int, str]:
    return (node.load_tokens, node.num_sequences, node.instance_id)
