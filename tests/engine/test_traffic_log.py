"""The line that a working engine writes every few seconds."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.step_record import StepRecord
from common.engine.traffic_log import TrafficLog


def record(time: float, **fields: Any) -> StepRecord:
    counts = {name: 0 for name in StepRecord.__struct_fields__ if name.startswith("num_")}
    seconds = {name: 0.0 for name in StepRecord.__struct_fields__ if name.endswith("_seconds")}
    values = {"step": 1, "time": time, "token_budget": 64, **counts, **seconds, "execute_seconds": 0.5}
    return StepRecord(**{**values, "num_blocks": 100, **fields})


def lines(caplog: pytest.LogCaptureFixture, records: list[StepRecord]) -> list[str]:
    traffic = TrafficLog("decode")
    with caplog.at_level("INFO"):
        for one in records:
            traffic(one)
    return [entry.message for entry in caplog.records]


def test_a_line_sums_up_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    steps = [
        record(
            i / 2,
            num_prefill_tokens=10,
            num_outputs=3,
            num_running=4,
            num_waiting=1,
            num_swapped=2,
            num_used_blocks=25,
            num_preempted=i == 3,
        )
        for i in range(25)
    ]
    found = lines(caplog, steps)
    assert found[0] == (
        "traffic role=decode prompt_tokens_per_second=20 output_tokens_per_second=6 step_ms=500"
        " running=4 waiting=3 kv_use=0.25 preempted=1"
    )
    assert len(found) == 2
    assert found[1].endswith("preempted=0")


def test_what_an_idle_engine_did_before_is_no_traffic_now(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, [record(0.0, num_outputs=100), record(60.0, num_outputs=1), record(61.0)]) == []


def test_a_step_that_was_left_computed_nothing(caplog: pytest.LogCaptureFixture) -> None:
    steps = [record(i / 2, num_prefill_tokens=10, is_cancelled=i % 2 == 0) for i in range(10)]
    assert "prompt_tokens_per_second=10 " in lines(caplog, steps)[0]
