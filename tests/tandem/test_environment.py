"""`tandem env`: what a bug report needs, on any processor, and nothing that is not to be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.dispatch import cpu_choice, use_cpu_kernels
from tandem.cli import main
from tandem.environment import cpu_features, found

X86 = "model name\t: Some CPU\nflags\t\t: fpu sse4_2 avx2 amx_bf16 bf16x\n\nprocessor\t: 1\nflags\t: avx512f\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


def test_it_prints_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "hidden")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    lines = {line[:18].strip(): line[19:] for line in out.splitlines()}
    assert "GiB (" in lines["memory limit"]
    assert "rms_norm" in lines["kernels"]
    assert lines["kernels"].startswith("cpu (")
    assert f" - {cpu_choice().name}, {cpu_choice().why}; --cpu-kernels also takes " in lines["kernels"]
    assert "for a node by default; torch by itself" in lines["threads"]
    assert "smollm2-135m-instruct" in lines["model aliases"]
    assert "TANDEM_API_KEY" in lines["variables set"]
    assert "hidden" not in out


@pytest.mark.parametrize(
    ("wanted", "shown"), [("reference", " - reference, as the flag says"), ("abacus", "none for TANDEM_CPU_KERNELS: ")]
)
def test_kernels_are_those_that_the_environment_asks_for(
    wanted: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CPU_KERNELS", wanted)
    assert shown in dict(found())["kernels"]
    monkeypatch.undo()
    use_cpu_kernels()  # for whatever runs after this


def test_without_a_home_all_else_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "~nobody-has-this-name/cache")
    assert dict(found())["cache"].startswith("unknown: no home folder")


@pytest.mark.parametrize(("text", "features"), [(X86, "sse4_2 avx2 amx_bf16"), (ARM, "asimd bf16 sve"), ("", "")])
def test_cpu_features(text: str, features: str, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_features(path) == features.split()
    assert cpu_features(tmp_path / "none") == []


def test_it_works_where_torch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.environment._torch", lambda: None)
    lines = dict(found())
    assert lines["kernels"] == "none: torch is not installed, so only a proxy can run here"
    assert lines["devices"] == "unknown: torch is not installed"
