"""`tandem steps`: its summary, its charts, and what it says about files and flags that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from common.engine.step_log import StepLogHeader, StepRecorder
from common.engine.step_record import StepRecord
from tandem.cli import main
from tandem.step_chart import MAX_STRETCHES, Stretches
from tandem.steps import load

HEADER = StepLogHeader(
    role="decode", node="n1", model="tiny", block_size=16, num_blocks=50, max_num_batched_tokens=64, max_num_seqs=8
)


def _step(number: int, **changes: Any) -> StepRecord:
    """One of 12 ms, every 20 ms, with 2 decode and 10 prefill tokens."""
    fields: dict[str, Any] = dict.fromkeys(StepRecord.__struct_fields__, 0)
    seconds = {"schedule_seconds": 0.001, "execute_seconds": 0.01, "update_seconds": 0.001, "swap_seconds": 0.0}
    counts = {"num_decode_tokens": 2, "num_prefill_tokens": 10, "num_scheduled_requests": 3, "num_outputs": 2}
    blocks = {"num_blocks": 50, "num_used_blocks": 20, "num_cached_blocks": 5, "num_unused_slots": 32}
    fields |= {"step": number, "time": number * 0.02, "token_budget": 64, "num_running": 3, "is_cancelled": False}
    return StepRecord(**(fields | seconds | counts | blocks | changes))


def _write(path: Path, records: list[StepRecord]) -> Path:
    recorder = StepRecorder(path, HEADER)
    for record in records:
        recorder(record)
    recorder.close()
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """100 steps in 2 seconds; one long, one with preemptions, one that was cancelled."""
    records = [_step(number) for number in range(100)]
    records[40] = _step(40, execute_seconds=0.5, num_used_blocks=45)
    records[60] = _step(60, num_preempted=3, num_swap_preempted=1, num_swapped=1)
    records[80] = _step(80, is_cancelled=True, num_outputs=0)
    return _write(tmp_path / "steps.jsonl", records)


def test_the_summary(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", str(recorded)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(recorded),
        "  node         decode n1, tiny",
        "  steps        100 in 2.0 s, busy 85% of it",
        "  tokens       1,200 (prefill 1,000, decode 200), 198 outputs",
        "  mean batch   12.0 of 64 tokens, 3.0 of 8 requests",
        "  step time    p50 12.0 ms, p99 16.9 ms, longest 502.0 ms (schedule 6%, execute 88%, update 6%)",
        "  preemptions  3 (recompute 2, swap 1)",
        "  peak KV use  45 of 50 blocks (90%)",
        "  cancelled    1 steps that nobody wanted any more",
        f"  chart        {recorded.with_suffix('.png')}",
    ]
    assert recorded.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_span_of_time_is_summed_up_alone(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", str(recorded), "--from", "1.2", "--to", "1.4"]) == 0
    out = capsys.readouterr().out
    assert "  steps        10 in 0.2 s" in out
    assert "  preemptions  3 (recompute 2, swap 1)" in out
    assert "  peak KV use  20 of 50 blocks" in out


def test_an_svg_names_what_it_shows(recorded: Path, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    assert main(["steps", str(recorded), "--output", str(chart)]) == 0
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    text = chart.read_text()
    for label in ("decode", "prefill", "budget", "used", "waiting for KV", "swapped", "recompute", "update"):
        assert f"<!-- {label} -->" in text, label


def test_a_few_steps_are_enough(tmp_path: Path) -> None:
    for count in (1, 2):
        path = _write(tmp_path / f"{count}.jsonl", [_step(number) for number in range(count)])
        assert main(["steps", str(path)]) == 0


def test_many_steps_are_drawn_as_few_that_keep_sums_and_peaks(tmp_path: Path) -> None:
    records = [_step(number) for number in range(20_000)]
    records[7_000] = _step(7_000, num_used_blocks=49)
    path = _write(tmp_path / "steps.jsonl", records)
    steps = load(path)
    stretches = Stretches(steps)
    assert len(stretches.start) <= MAX_STRETCHES
    assert stretches.maximum(steps["num_used_blocks"]).max() == 49
    np.testing.assert_allclose(stretches.mean(steps.tokens), 12)
    assert main(["steps", str(path)]) == 0


def test_lines_fall_to_zero_while_nothing_is_computed(tmp_path: Path) -> None:
    records = [_step(0), _step(1), _step(2, time=9.0)]
    stretches = Stretches(load(_write(tmp_path / "steps.jsonl", records)))
    x, y = stretches.while_busy(np.array([5, 6, 7]))
    np.testing.assert_allclose(x, [0.0, 0.02, 0.032, 9.0, 9.012])
    assert y.tolist() == [5, 6, 0, 7, 0]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--output", "chart.pdf"], "--output is chart.pdf, must end with .png or .svg"),
        (["--from", "2", "--to", "1"], "--from is 2, must be less than --to, which is 1"),
        (["--from", "x"], "invalid float value"),
    ],
)
def test_wrong_flags_are_refused(
    recorded: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["steps", str(recorded), *flags])
    assert complaint in capsys.readouterr().err


def test_what_cannot_be_read_or_drawn_is_said_in_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = _write(tmp_path / "bare.jsonl", [])
    for arguments, complaint in (
        ([str(tmp_path / "none.jsonl")], "none.jsonl: No such file or directory"),
        ([__file__], "is no step log: its first line is not the header --record-steps writes"),
        ([str(bare)], "has no steps: the node has computed or written nothing yet"),
        ([str(recorded), "--from", "7"], "its steps began at 0.000 to 1.980 s"),
        ([str(recorded), "--output", str(tmp_path / "none" / "x.png")], "x.png: No such file or directory"),
    ):
        assert main(["steps", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("tandem steps: ")
        assert complaint in error
        assert len(error.splitlines()) == 1


def test_without_matplotlib_the_summary_comes_and_what_to_install(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tandem.step_chart", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["steps", str(recorded)]) == 1
    captured = capsys.readouterr()
    assert "  steps        100 in" in captured.out
    assert "pip install 'tandem-serve[plot]'" in captured.err


def test_nothing_but_the_chart_imports_matplotlib() -> None:
    script = "import tandem.cli, tandem.steps, tandem.serve, proxy.app, decode_node.main, prefill_node.main, sys\n"
    script += "print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
