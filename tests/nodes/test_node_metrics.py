"""The metrics of a node: a golden list of names, types and labels, and where their values come from."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from common import messages as m
from common.config import parse
from common.engine.step_observers import StepMetrics
from common.engine.step_record import StepRecord
from common.kv_layout import KVLayout
from common.metrics import Metrics, exposition
from common.node_process import node_metrics
from decode_node.config import DecodeConfig
from decode_node.metrics import DecodeMetrics
from kvtransfer.metrics import TransferCollector
from kvtransfer.stats import TransferStats

LAYOUT = KVLayout(2, 1, 4, 16, "float32", "tiny")
STATS = m.NodeStats(
    num_running=1,
    num_waiting=2,
    num_waiting_for_kv=3,
    num_swapped=4,
    num_blocks=10,
    num_free_blocks=5,
    num_unused_slots=6,
    num_host_blocks=7,
    num_free_host_blocks=8,
    num_preemptions=9,
    num_swap_preemptions=2,
)
OF_NODE = "model_name node role"
GOLDEN = {
    "tandem:decode_requests_total": ("counter", "model_name split"),
    "tandem:dropped_frames_total": ("counter", "reason side"),
    "tandem:fetches_total": ("counter", "outcome side"),
    "tandem:handoff_gap_seconds": ("histogram", "model_name"),
    "tandem:kv_cache_unused_slots": ("gauge", OF_NODE),
    "tandem:preemptions_total": ("counter", "mode model_name node role"),
    "tandem:step_seconds": ("histogram", OF_NODE),
    "tandem:swap_blocks": ("gauge", OF_NODE),
    "tandem:swap_blocks_free": ("gauge", OF_NODE),
    "tandem:transfer_bytes_total": ("counter", "direction side"),
    "vllm:cache_config_info": ("gauge", "block_size cache_dtype model_name node num_cpu_blocks num_gpu_blocks role"),
    "vllm:gpu_cache_usage_perc": ("gauge", OF_NODE),
    "vllm:iteration_tokens_total": ("histogram", OF_NODE),
    "vllm:kv_cache_usage_perc": ("gauge", OF_NODE),
    "vllm:num_preemptions_total": ("counter", OF_NODE),
    "vllm:num_requests_running": ("gauge", OF_NODE),
    "vllm:num_requests_swapped": ("gauge", OF_NODE),
    "vllm:num_requests_waiting": ("gauge", OF_NODE),
    "vllm:prefix_cache_hits_total": ("counter", OF_NODE),
    "vllm:prefix_cache_queries_total": ("counter", OF_NODE),
}


def _step(**changes: object) -> StepRecord:
    fields: dict[str, object] = dict.fromkeys(StepRecord.__struct_fields__, 0)
    return StepRecord(**(fields | {"is_cancelled": False} | changes))


def _node() -> tuple[Metrics, StepMetrics, DecodeMetrics]:
    """A decode node's registry, as its process puts it together, after a bit of everything."""
    metrics = node_metrics("decode", parse(DecodeConfig, ["--model", "tiny"]), "node-1", LAYOUT, lambda: STATS)
    transfers = TransferStats()
    transfers.fetches["complete"] += 1
    transfers.dropped_frames["corrupt"] += 1
    metrics.registry.register(TransferCollector(transfers, "client"))
    steps, requests = StepMetrics(metrics, "node-1", "decode"), DecodeMetrics(metrics)
    requests.admitted("r", has_sources=True)
    requests.output("r")
    requests.output("r")
    return metrics, steps, requests


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    of_node = {"model_name": "tiny", "node": "node-1", "role": "decode"}
    return metrics.registry.get_sample_value(name, of_node | labels)


def test_the_golden_list() -> None:
    text = exposition(_node()[0].registry)[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, " ".join(labels))
    assert found == GOLDEN
    assert 'vllm:iteration_tokens_total_bucket{le="1.0",model_name="tiny",node="node-1",role="decode"}' in text


def test_values_come_from_the_nodes_stats() -> None:
    metrics, _, _ = _node()
    assert _value(metrics, "vllm:num_requests_waiting") == 5
    assert _value(metrics, "vllm:num_requests_swapped") == 4
    assert _value(metrics, "tandem:kv_cache_unused_slots") == 6
    assert _value(metrics, "tandem:swap_blocks") == 7
    assert _value(metrics, "tandem:swap_blocks_free") == 8
    assert _value(metrics, "vllm:num_preemptions_total") == 9
    assert _value(metrics, "tandem:preemptions_total", mode="recompute") == 7
    assert _value(metrics, "tandem:preemptions_total", mode="swap") == 2
    config = {"block_size": "16", "cache_dtype": "float32", "num_gpu_blocks": "10", "num_cpu_blocks": "7"}
    assert _value(metrics, "vllm:cache_config_info", **config) == 1


def test_a_steps_tokens_are_those_it_computed() -> None:
    metrics, steps, _ = _node()
    steps(_step(num_decode_tokens=3, num_prefill_tokens=60, execute_seconds=0.03, update_seconds=0.001))
    steps(_step(num_hidden_rows=1))
    steps(_step(num_prefill_tokens=64, is_cancelled=True))
    assert _value(metrics, "vllm:iteration_tokens_total_sum") == 63
    assert _value(metrics, "vllm:iteration_tokens_total_count") == 1
    assert _value(metrics, "vllm:iteration_tokens_total_bucket", le="64.0") == 1
    assert _value(metrics, "vllm:iteration_tokens_total_bucket", le="32.0") == 0
    assert _value(metrics, "tandem:step_seconds_count") == 3
