"""Measures requests as the proxy sees them: arrival, placement, each output, the end. Knows no HTTP."""

from __future__ import annotations

from common import metrics as names
from common.clock import Clock, SystemClock
from common.metrics import Metrics


class RequestMetrics:
    """The request metrics of one proxy."""

    def __init__(self, metrics: Metrics, clock: Clock | None = None) -> None:
        self.metrics = metrics
        self.clock = clock or SystemClock()

    def arrived(self, num_prompt_tokens: int, at: float) -> RequestTrace:
        """`at`: time on the clock when its first byte was read, before it was tokenized."""
        return RequestTrace(self, num_prompt_tokens, at)


class RequestTrace:
    """The times of one request. `ended` counts it, once."""

    def __init__(self, owner: RequestMetrics, num_prompt_tokens: int, arrived: float) -> None:
        self._metrics = owner.metrics
        self._clock = owner.clock
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived = arrived
        self._placed: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._num_outputs = 0
        self._is_ended = False

    @property
    def age_seconds(self) -> float:
        return self._clock.now() - self._arrived

    def placed(self, cause: str) -> None:
        """A leg was opened because of `cause`: "new", "rejected" or "lost"."""
        self._metrics.counter(names.LEGS, cause=cause).inc()
        if self._placed is None:
            self._placed = self._clock.now()
            self._observe(names.QUEUE_TIME, self._placed - self._arrived)

    def outputs(self, count: int) -> None:
        """`count` new tokens came, in one message."""
        if not count:
            return
        now = self._clock.now()
        if self._last is None:
            self._first = now
            self._observe(names.TTFT, now - self._arrived)
            self._observe(names.PREFILL_TIME, now - (self._placed or self._arrived))
        else:
            self._observe(names.ITL, now - self._last)
        self._last = now
        self._num_outputs += count

    def ended(self, finish_reason: str, num_generated_tokens: int) -> None:
        """finish_reason: stop, length, abort (the client left) or error."""
        if self._is_ended:
            return
        self._is_ended = True
        metrics = self._metrics
        metrics.counter(names.REQUEST_SUCCESS, finished_reason=finish_reason).inc()
        metrics.counter(names.PROMPT_TOKENS).inc(self._num_prompt_tokens)
        metrics.counter(names.GENERATION_TOKENS).inc(num_generated_tokens)
        self._observe(names.REQUEST_PROMPT_TOKENS, self._num_prompt_tokens)
        self._observe(names.REQUEST_GENERATION_TOKENS, num_generated_tokens)
        self._observe(names.E2E_LATENCY, self._clock.now() - self._arrived)
        if self._first is not None and self._last is not None:
            self._observe(names.DECODE_TIME, self._last - self._first)
            if self._num_outputs > 1:
                for metric in (names.TPOT, names.OLDER_TPOT):
                    self._observe(metric, (self._last - self._first) / (self._num_outputs - 1))

    def _observe(self, metric: names.Metric, value: float) -> None:
        self._metrics.histogram(metric).observe(value)
