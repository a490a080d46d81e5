"""What a decode node measures of its own: the hand-off gap and how requests got their KV. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.clock import Clock, SystemClock
from common.metrics import Metric, Metrics

HANDOFF_GAP = Metric(
    "histogram",
    "tandem:handoff_gap_seconds",
    "Output 0 to output 1 of requests whose KV was to be fetched",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REQUESTS = Metric("counter", "tandem:decode_requests", "Requests admitted, by whether sources were named", ("split",))


@dataclass
class _Times:
    has_sources: bool
    first_output: float | None = None


class DecodeMetrics:
    def __init__(self, metrics: Metrics, clock: Clock | None = None) -> None:
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._times: dict[str, _Times] = {}

    def admitted(self, engine_id: str, *, has_sources: bool) -> None:
        self._times[engine_id] = _Times(has_sources)
        self._metrics.counter(REQUESTS, split=str(has_sources).lower()).inc()

    def output(self, engine_id: str) -> None:
        times = self._times.get(engine_id)
        if times is None or not times.has_sources:
            return
        if times.first_output is None:
            times.first_output = self._clock.now()
        else:
            self._metrics.histogram(HANDOFF_GAP).observe(self._clock.now() - times.first_output)
            del self._times[engine_id]  # one gap for each request

    def ended(self, engine_id: str) -> None:
        self._times.pop(engine_id, None)
