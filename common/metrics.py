"""Names, buckets and labels of the metrics that proxy and nodes share, over prometheus_client.

The names are those that dashboards and autoscalers scrape from this kind of server (`vllm:*`); what is ours
alone is `tandem:*`. A metric appears in its registry when it is first used. Knows nothing of who counts what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from common.kv_layout import KVLayout
from common.messages import NodeStats, Role

Kind = Literal["counter", "gauge", "histogram"]

# fmt: off
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
GAP_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_BUCKETS = (.001, .0025, .005, .01, .015, .02, .03, .04, .06, .08, .1, .15, .25, .5, 1, 2.5, 5, 10)
# fmt: on


@dataclass(frozen=True)
class Metric:
    """`name` without the _total that counters get; `labels` beside model_name, which all have."""

    kind: Kind
    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


PROMPT_TOKENS = Metric("counter", "vllm:prompt_tokens", "Prompt tokens of finished requests")
GENERATION_TOKENS = Metric("counter", "vllm:generation_tokens", "Tokens that answers are made of")
REQUEST_SUCCESS = Metric("counter", "vllm:request_success", "Finished requests by reason", ("finished_reason",))
TTFT = Metric("histogram", "vllm:time_to_first_token_seconds", "Arrival to first output", buckets=TTFT_BUCKETS)
ITL = Metric("histogram", "vllm:inter_token_latency_seconds", "Gap between two outputs", buckets=GAP_BUCKETS)
TPOT = Metric(
    "histogram",
    "vllm:request_time_per_output_token_seconds",
    "(last output - first output) / (outputs - 1), one per request",
    buckets=GAP_BUCKETS,
)
OLDER_TPOT = Metric(
    "histogram", "vllm:time_per_output_token_seconds", f"Older name of {TPOT.name}", buckets=GAP_BUCKETS
)
E2E_LATENCY = Metric("histogram", "vllm:e2e_request_latency_seconds", "Arrival to end", buckets=LATENCY_BUCKETS)
QUEUE_TIME = Metric("histogram", "vllm:request_queue_time_seconds", "Arrival to placement", buckets=LATENCY_BUCKETS)
PREFILL_TIME = Metric(
    "histogram", "vllm:request_prefill_time_seconds", "Placement to first output", buckets=LATENCY_BUCKETS
)
DECODE_TIME = Metric(
    "histogram", "vllm:request_decode_time_seconds", "First output to last output", buckets=LATENCY_BUCKETS
)
REQUEST_PROMPT_TOKENS = Metric(
    "histogram", "vllm:request_prompt_tokens", "Prompt tokens of a request", buckets=TOKEN_BUCKETS
)
REQUEST_GENERATION_TOKENS = Metric(
    "histogram", "vllm:request_generation_tokens", "Tokens of an answer", buckets=TOKEN_BUCKETS
)
ITERATION_TOKENS = Metric(
    "histogram",
    "vllm:iteration_tokens_total",
    "Tokens computed in an engine step",
    ("node", "role"),
    STEP_TOKEN_BUCKETS,
)
STEP_SECONDS = Metric(
    "histogram", "tandem:step_seconds", "An engine step: schedule, execute, update", ("node", "role"), STEP_BUCKETS
)
LEGS = Metric("counter", "tandem:request_legs", "Placements of requests on decode nodes, by cause", ("cause",))
BAD_MESSAGES = Metric("counter", "tandem:control_messages_dropped", "Control messages dropped as not valid")
NODES = Metric("gauge", "tandem:nodes", "Nodes that are joined", ("role",))


_F = TypeVar("_F", bound=MetricWrapperBase)


class Metrics:
    """The metrics of one process. `get(METRIC, label=value)` makes what is missing."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # series that nobody scrapes, one for each real one
        self.registry = registry or CollectorRegistry()
        self._model_name = model_name
        self._families: dict[str, MetricWrapperBase] = {}

    def counter(self, metric: Metric, **labels: str) -> Counter:
        return self._child(metric, Counter, labels)

    def gauge(self, metric: Metric, **labels: str) -> Gauge:
        return self._child(metric, Gauge, labels)

    def histogram(self, metric: Metric, **labels: str) -> Histogram:
        return self._child(metric, Histogram, labels)

    def _child(self, metric: Metric, kind: type[_F], labels: dict[str, str]) -> _F:
        family = self._families.get(metric.name)
        if family is None:
            family = self._families[metric.name] = self._make(metric)
        assert isinstance(family, kind), f"{metric.name} is a {metric.kind}"
        return family.labels(model_name=self._model_name, **labels)

    def _make(self, metric: Metric) -> MetricWrapperBase:
        names = ("model_name", *metric.labels)
        if metric.kind == "counter":
            return Counter(metric.name, metric.documentation, names, registry=self.registry)
        if metric.kind == "gauge":
            return Gauge(metric.name, metric.documentation, names, registry=self.registry)
        return Histogram(metric.name, metric.documentation, names, registry=self.registry, buckets=metric.buckets)


# --- what nodes report of themselves -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSample:
    """Stats of one node, at the moment of a scrape."""

    node: str
    role: Role
    stats: NodeStats
    layout: KVLayout


def _used_fraction(stats: NodeStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


_NODE_LABELS = ("model_name", "node", "role")
_WAITING = "vllm:num_requests_waiting"
_GAUGES: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests that a node computes", lambda stats: stats.num_running),
    (
        _WAITING,
        "Requests that wait, on nodes and at the proxy",
        lambda stats: stats.num_waiting + stats.num_waiting_for_kv,
    ),
    ("vllm:num_requests_swapped", "Requests whose KV waits in host memory", lambda stats: stats.num_swapped),
    ("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1", _used_fraction),
    ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc", _used_fraction),
    ("tandem:kv_cache_unused_slots", "Slots of allocated blocks without KV", lambda stats: stats.num_unused_slots),
    ("tandem:swap_blocks", "Blocks that the swap space has", lambda stats: stats.num_host_blocks),
    ("tandem:swap_blocks_free", "Blocks that are free in the swap space", lambda stats: stats.num_free_host_blocks),
)
_COUNTERS: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", lambda stats: stats.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", lambda stats: stats.prefix_cache_hits),
    ("vllm:num_preemptions", "Preempted requests", lambda stats: stats.num_preemptions),
)
_PREEMPTION_MODES: tuple[tuple[str, Callable[[NodeStats], float]], ...] = (
    ("recompute", lambda stats: stats.num_preemptions - stats.num_swap_preemptions),
    ("swap", lambda stats: stats.num_swap_preemptions),
)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """What /metrics answers, and its content type: the plain text format, whatever the scraper accepts.

    In OpenMetrics prometheus_client writes vllm_x for vllm:x unless it is told not to, which older scrapers do not.
    """
    encode, content_type = choose_encoder("")
    return encode(registry), content_type


class NodeStatsCollector(Collector):
    """Turns nodes' own stats into series when somebody scrapes; a node that left has no series any more.

    samples, num_waiting_at_proxy: called at each scrape.
    """

    def __init__(
        self,
        model_name: str,
        samples: Callable[[], Iterable[NodeSample]],
        num_waiting_at_proxy: Callable[[], int] | None = None,
    ) -> None:
        self._model_name = model_name
        self._samples = samples
        self._num_waiting_at_proxy = num_waiting_at_proxy

    def collect(self) -> Iterable[Any]:
        samples = list(self._samples())
        for name, documentation, value in _GAUGES:
            gauge = GaugeMetricFamily(name, documentation, labels=_NODE_LABELS)
            self._fill(gauge, samples, value)
            if name == _WAITING and self._num_waiting_at_proxy is not None:
                gauge.add_metric([self._model_name, "proxy", "proxy"], self._num_waiting_at_proxy())
            yield gauge
        for name, documentation, value in _COUNTERS:
            counter = CounterMetricFamily(name, documentation, labels=_NODE_LABELS)
            self._fill(counter, samples, value)
            yield counter
        yield self._preemptions(samples)
        yield self._cache_config(samples)

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: list[NodeSample],
        value: Callable[[NodeStats], float],
    ) -> None:
        for sample in samples:
            family.add_metric(self._labels(sample), value(sample.stats))

    def _preemptions(self, samples: list[NodeSample]) -> CounterMetricFamily:
        labels = (*_NODE_LABELS, "mode")
        family = CounterMetricFamily(
            "tandem:preemptions", "Preempted requests by what became of their KV", labels=labels
        )
        for sample in samples:
            for mode, value in _PREEMPTION_MODES:
                family.add_metric([*self._labels(sample), mode], value(sample.stats))
        return family

    def _cache_config(self, samples: list[NodeSample]) -> GaugeMetricFamily:
        names = (*_NODE_LABELS, "block_size", "cache_dtype", "num_gpu_blocks", "num_cpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "KV cache of each node; always 1", labels=names)
        for sample in samples:
            layout, stats = sample.layout, sample.stats
            values = (layout.block_size, layout.dtype, stats.num_blocks, stats.num_host_blocks)
            family.add_metric([*self._labels(sample), *map(str, values)], 1)
        return family

    def _labels(self, sample: NodeSample) -> list[str]:
        return [self._model_name, sample.node, sample.role]
