"""Measures requests as the proxy sees them: arrival, placement, each output, the end. Knows no HTTP.

As in vLLM every choice counts as a request where its answer is measured (end, tokens, latency, gaps between outputs).
What the choices of a prompt have in common is counted once: prompt tokens, time in the queue, time to the first output.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from common import metrics as names
from common.clock import Clock, SystemClock
from common.metrics import Metrics
from proxy.traffic_log import Totals


class RequestMetrics:
    """The request metrics of one proxy."""

    def __init__(self, metrics: Metrics, clock: Clock | None = None) -> None:
        self.metrics = metrics
        self.clock = clock or SystemClock()
        self.totals = Totals()

    def arrived(self, num_prompt_tokens: int, at: float) -> RequestTrace:
        """`at`: time on the clock when its first byte was read, before it was tokenized."""
        return RequestTrace(self, num_prompt_tokens, at)


@dataclass
class _ChoiceTimes:
    first: float | None = None
    last: float | None = None
    num_outputs: int = 0
    is_ended: bool = False


class RequestTrace:
    """The times of one prompt and its choices. `ended` counts each choice, once."""

    def __init__(self, owner: RequestMetrics, num_prompt_tokens: int, arrived: float) -> None:
        self._metrics = owner.metrics
        self._totals = owner.totals
        self._clock = owner.clock
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived = arrived
        self._placed: float | None = None
        self._has_outputs = False
        self._is_counted = False
        self._choices: defaultdict[int, _ChoiceTimes] = defaultdict(_ChoiceTimes)

    @property
    def age_seconds(self) -> float:
        return self._clock.now() - self._arrived

    def placed(self, cause: str) -> None:
        """A leg was opened because of `cause`: "new", "rejected" or "lost"."""
        self._metrics.counter(names.LEGS, cause=cause).inc()
        if self._placed is None:
            self._placed = self._clock.now()
            self._observe(names.QUEUE_TIME, self._placed - self._arrived)

    def outputs(self, count: int, choice: int = 0) -> None:
        """`count` new tokens of a choice came, in one message."""
        if not count:
            return
        now, times = self._clock.now(), self._choices[choice]
        self._totals.num_outputs += count
        if not self._has_outputs:
            self._has_outputs = True
            self._totals.num_prompt_tokens += self._num_prompt_tokens
            self._observe(names.TTFT, now - self._arrived)
            self._observe(names.PREFILL_TIME, now - (self._placed or self._arrived))
        if times.last is None:
            times.first = now
        else:
            self._observe(names.ITL, now - times.last)
        times.last = now
        times.num_outputs += count

    def ended(self, finish_reason: str, num_generated_tokens: int, choice: int = 0) -> None:
        """finish_reason: stop, length, abort (the client left) or error."""
        times = self._choices[choice]
        if times.is_ended:
            return
        times.is_ended = True
        self._totals.num_ended += 1
        self._count_prompt()
        self._metrics.counter(names.REQUEST_SUCCESS, finished_reason=finish_reason).inc()
        self._metrics.counter(names.GENERATION_TOKENS).inc(num_generated_tokens)
        self._observe(names.REQUEST_GENERATION_TOKENS, num_generated_tokens)
        self._observe(names.E2E_LATENCY, self._clock.now() - self._arrived)
        if times.first is not None and times.last is not None:
            self._observe(names.DECODE_TIME, times.last - times.first)
            if times.num_outputs > 1:
                for metric in (names.TPOT, names.OLDER_TPOT):
                    self._observe(metric, (times.last - times.first) / (times.num_outputs - 1))

    def _count_prompt(self) -> None:
        """With the first choice that ends."""
        if not self._is_counted:
            self._is_counted = True
            self._metrics.counter(names.PROMPT_TOKENS).inc(self._num_prompt_tokens)
            self._observe(names.REQUEST_PROMPT_TOKENS, self._num_prompt_tokens)

    def _observe(self, metric: names.Metric, value: float) -> None:
        self._metrics.histogram(metric).observe(value)
