"""Writes docs/configuration.md and docs/metrics.md from the code: `make docs`. A test compares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

from prometheus_client import CollectorRegistry

from common import metrics
from common.command_line import ENV_PREFIX, Flags, flag_name, plain_value
from common.config import ClusterFlags, EngineFlags, ModelFlags, NodeFlags
from common.kv_layout import KVLayout
from common.messages import NodeStats
from common.metrics import Metric, Metrics, NodeSample, NodeStatsCollector
from common.offline.flags import OfflineFlags
from decode_node import metrics as decode_metrics
from decode_node.config import DecodeConfig
from kvtransfer.metrics import TransferCollector
from kvtransfer.stats import TransferStats
from prefill_node.config import PrefillConfig
from proxy.config import ProxyConfig
from tandem.config import ServeConfig

DOCS = Path(__file__).resolve().parent
PROCESSES: list[tuple[str, type[Flags]]] = [
    ("tandem serve", ServeConfig),
    ("tandem proxy", ProxyConfig),
    ("tandem prefill", PrefillConfig),
    ("tandem decode", DecodeConfig),
    ("LLM", OfflineFlags),
]
SHARED: list[tuple[str, type[Flags]]] = [
    ("Every process", Flags),
    ("Every process that reads the model", ModelFlags),
    ("Every process of a cluster", ClusterFlags),
    ("Every engine", EngineFlags),
    ("Both kinds of node", NodeFlags),
]


def configuration() -> str:
    parts = [
        "# Configuration",
        "Written by `make docs` from the config classes. A flag wins over the environment, that over the file of"
        f" `--config`, that over the default. `--max-model-len` is `{ENV_PREFIX}MAX_MODEL_LEN` in the environment and"
        " `max_model_len` as a keyword of `LLM`; `tandem config` shows what is in force and where it came from.",
        "The file is YAML, and one file does for all processes: `max_num_seqs: 8` at its top is for all that know it,"
        " in a section (`decode: {max_num_seqs: 8}`; also `proxy:`, `prefill:`, `serve:`) for one kind, before the top."
        " `port` at the top is that of the OpenAI API, for `tandem serve` and `tandem proxy`. What two nodes cannot"
        f" share ({_of_one_process()}) stands in a section; a node refuses it at the top.",
    ]
    known: set[str] = set()
    for title, config in SHARED:
        parts += _section(title, config, known)
        known |= set(config.model_fields)
    for title, config in PROCESSES:
        parts += _section(title, config, _same_as_in_a_base(config))
    return "\n\n".join(parts) + "\n"


def _of_one_process() -> str:
    return ", ".join(f"`{name}`" for name in sorted(NodeFlags.of_one_process))


def _same_as_in_a_base(config: type[Flags]) -> set[str]:
    """Fields that a shared section shows already, with the same default."""
    found: set[str] = set()
    for _, base in SHARED:
        if issubclass(config, base):
            found |= {
                name for name, field in base.model_fields.items() if config.model_fields[name].default == field.default
            }
    return found


def _section(title: str, config: type[Flags], known: Iterable[str]) -> list[str]:
    rows = [
        " | ".join(
            [
                f"| `{flag_name(name)}`",
                _default(field.default),
                _cell(field.description or "") + _choices(field.annotation) + " |",
            ]
        )
        for name, field in config.model_fields.items()
        if name not in set(known)
    ]
    if not rows:
        return []
    return [f"## {title}", "\n".join(["| flag | default | |", "|---|---|---|", *rows])]


def _default(value: Any) -> str:
    if value is None or value in ((), [], ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{','.join(value) if isinstance(value, tuple) else plain_value(value)}`"


def _choices(annotation: Any) -> str:
    """Of a Literal, however deep it lies."""
    if get_origin(annotation) is not None and str(get_origin(annotation)) == "typing.Literal":
        return " (" + ", ".join(f"`{choice}`" for choice in get_args(annotation)) + ")"
    return next((text for part in get_args(annotation) if (text := _choices(part))), "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    head = (
        "# Metrics\n\nWritten by `make docs` from the registries. Every process serves `/metrics`: the proxy those of"
        " requests and, with labels `node` and `role`, those of all nodes; a node its own. Counters end in `_total`,"
        " histograms have `_bucket`, `_sum` and `_count`.\n"
    )
    rows = [
        f"| `{family.name}` | {family.type} | {_labels(family)} | {_cell(family.documentation)} |"
        for family in sorted(_registry().collect(), key=lambda family: family.name)
    ]
    return "\n".join([head, "| name | kind | labels | |", "|---|---|---|---|", *rows]) + "\n"


def _labels(family: Any) -> str:
    names = {name for sample in family.samples for name in sample.labels} - {"le", "model_name"}
    return ", ".join(f"`{name}`" for name in sorted(names))


def _registry() -> CollectorRegistry:
    """All series there can be, each with a sample."""
    found = Metrics("model")
    for module in (metrics, decode_metrics):
        for metric in [value for value in vars(module).values() if isinstance(value, Metric)]:
            getattr(found, metric.kind)(metric, **dict.fromkeys(metric.labels, "x"))
    layout = KVLayout(1, 1, 1, 16, "float32", "model")
    found.registry.register(
        NodeStatsCollector("model", lambda: [NodeSample("x", "decode", NodeStats(num_blocks=1), layout)])
    )
    stats = TransferStats()
    stats.fetches["x"] += 1
    stats.dropped_frames["x"] += 1
    found.registry.register(TransferCollector(stats, "client"))
    return found.registry


PAGES = {"configuration.md": configuration, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write())
