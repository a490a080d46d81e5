"""A prefill node towards its proxies: says who it is and how loaded it is. Work comes over the fetch plane."""

from __future__ import annotations

from collections.abc import Callable

from common import messages as m
from prefill_node.engine_store import EngineStore


class PrefillNode:
    """Handles control messages; the proxies never place a request here, decode nodes fetch."""

    def __init__(
        self,
        store: EngineStore,
        *,
        stats: Callable[[], m.NodeStats],
        hello: Callable[[m.NodeStats, list[m.LiveRequest]], m.Hello],
        reset_prefix_cache: Callable[[], None],
    ) -> None:
        self._store = store
        self._stats = stats
        self._hello = hello
        self._reset_prefix_cache = reset_prefix_cache

    def hello(self, proxy_id: str) -> m.Hello:
        return self._hello(self._stats(), [])

    def status(self) -> m.Status:
        return m.Status(stats=self._stats(), is_draining=self._store.is_draining)

    def received(self, proxy_id: str, message: m.ProxyMessage) -> None:
        if isinstance(message, m.Drain):
            self.drain()
        elif isinstance(message, m.ResetPrefixCache):
            self._reset_prefix_cache()

    def acknowledged(self, proxy_id: str, sequence: int) -> None:
        pass  # nothing it sends must be sent again

    def proxy_lost(self, proxy_id: str) -> None:
        pass  # open fetches belong to decode nodes, which know whether they still want them

    def drain(self) -> None:
        self._store.is_draining = True

    @property
    def num_live_requests(self) -> int:
        return self._store.num_open
