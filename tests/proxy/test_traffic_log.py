"""The line that a proxy under traffic writes every few seconds."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.traffic_log import Load, Totals, TrafficLog


def test_each_line_tells_what_came_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    totals, load = Totals(), [Load(0, 0, 2)]
    traffic = TrafficLog(totals, lambda: load[0])
    with caplog.at_level("INFO"):
        traffic.write(5.0)
        assert not caplog.messages, "nothing runs"
        totals.num_prompt_tokens, totals.num_outputs, totals.num_ended, load[0] = 100, 60, 1, Load(3, 1, 2)
        traffic.write(5.0)
        totals.num_outputs = 70
        traffic.write(5.0)
        traffic.write(5.0)
        load[0] = Load(0, 0, 2)
        traffic.write(5.0)
    head = "traffic requests=3 waiting=1 nodes=2 "
    assert caplog.messages == [
        head + "output_tokens_per_second=12 prompt_tokens_per_second=20 ended=1",
        head + "output_tokens_per_second=2 prompt_tokens_per_second=0 ended=0",
        head + "output_tokens_per_second=0 prompt_tokens_per_second=0 ended=0",
    ]


async def test_requests_count(start_proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Totals] = []
    init = TrafficLog.__init__

    def note(self: TrafficLog, totals: Totals, *args: Any, **options: Any) -> None:
        made.append(totals)
        init(self, totals, *args, **options)

    monkeypatch.setattr(TrafficLog, "__init__", note)
    proxy = await start_proxy()
    await proxy.node(lambda _: [*proxy.ids("an answer")])
    reply = await proxy.complete(prompt="some words", n=2, max_tokens=2)
    [totals] = made
    assert totals == Totals(reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"], 2)
