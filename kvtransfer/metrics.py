"""Counters of the fetch plane as Prometheus series, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvtransfer.stats import TransferStats


class TransferCollector(Collector):
    """side: "client" (blocks fetched) or "server" (blocks served)."""

    def __init__(self, stats: TransferStats, side: str) -> None:
        self._stats = stats
        self._side = side

    def collect(self) -> Iterable[CounterMetricFamily]:
        stats, side = self._stats, self._side
        moved = CounterMetricFamily("tandem:transfer_bytes", "Bytes moved by fetches", labels=["side", "direction"])
        moved.add_metric([side, "sent"], stats.num_bytes_sent)
        moved.add_metric([side, "received"], stats.num_bytes_received)
        yield moved
        fetches = CounterMetricFamily("tandem:fetches", "Fetches that ended, by outcome", labels=["side", "outcome"])
        for outcome, count in dict(stats.fetches).items():
            fetches.add_metric([side, outcome], count)
        yield fetches
        dropped = CounterMetricFamily("tandem:dropped_frames", "Frames dropped, by reason", labels=["side", "reason"])
        for reason, count in dict(stats.dropped_frames).items():
            dropped.add_metric([side, reason], count)
        yield dropped
