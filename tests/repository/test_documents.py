"""Documents that are made of the code, and flags and metrics that they must name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from common.offline.flags import OfflineFlags
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from proxy.config import ProxyConfig
from tandem.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
GENERATED: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_pages_are_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == GENERATED[name](), "run make docs"


@pytest.mark.parametrize("config", [ServeConfig, ProxyConfig, PrefillConfig, DecodeConfig, OfflineFlags])
def test_every_flag_is_documented(config: Any) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in config.model_fields if f"`--{name.replace('_', '-')}`" not in text] == []


def test_every_metric_in_the_code_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    packages = ("common", "decode_node", "kvtransfer", "prefill_node", "proxy")
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    names = {name for source in sources for name in re.findall(r'"((?:vllm|tandem):[a-z_]+)"', source)}
    assert len(names) > 30
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("document", ["tuning.md", "getting-started.md"])
def test_flags_that_the_pages_name_exist(document: str) -> None:
    known = {name for config in (ServeConfig, ProxyConfig, PrefillConfig, DecodeConfig) for name in config.model_fields}
    text = (ROOT / "docs" / document).read_text()
    used = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", text)} - {"record_steps", "config"}
    used -= {"build", "detach", "scale"}  # of Compose
    assert used <= known
