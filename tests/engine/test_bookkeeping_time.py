"""What a step costs besides computing: schedule, update and events of a full house of streams."""

import statistics
import time

import pytest


@pytest.mark.slow
def test_a_step_of_64_streams_costs_less_than_a_millisecond(make_engine, make_request):
    engine = make_engine(num_blocks=8192, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048)
    for _ in range(64):
        engine.add(make_request(200, max_tokens=1000))
    while engine.stats().num_waiting or engine.stats().num_queued_tokens > 64:
        engine.step()
    times = []
    for _ in range(300):
        start = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - start)
        assert len(events) == 64
    assert statistics.median(times) < 1e-3
