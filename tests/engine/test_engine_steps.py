"""What an engine tells of its steps, and what it learns from them."""

import pytest

from common.clock import ManualClock
from common.engine.events import FailedEvent
from common.request import RequestStatus
from common.scheduling.output import SchedulerOutput, StepResult


class TimedRunner:
    """A runner that takes fixed_seconds and 1 ms a row, and 5 ms for each block it swaps."""

    def __init__(self, runner, clock, fixed_seconds=0.040):
        self.runner = runner
        self.clock = clock
        self.fixed_seconds = fixed_seconds

    def execute(self, batch, inbox, should_cancel):
        result = self.runner.execute(batch, inbox, should_cancel)
        swap_seconds = 0.005 * (len(batch.swap_outs) + len(batch.swap_ins))
        self.clock.advance(self.fixed_seconds + 0.001 * batch.num_scheduled_tokens + swap_seconds)
        return StepResult(result.sampled, result.hidden, result.is_cancelled, swap_seconds)


@pytest.fixture
def timed(make_engine, runner):
    """An engine on a clock of its own, and the records of its steps."""

    def make(**config):
        clock = ManualClock(100.0)
        engine = make_engine(clock=clock, **config)
        engine._runner = TimedRunner(runner, clock)
        records = []
        engine.observe_steps(records.append)
        return engine, records

    return make


def test_a_record_of_each_executed_step(timed, make_request):
    engine, records = timed(max_num_batched_tokens=16, num_blocks=20)
    engine.add(make_request(4, max_tokens=3))
    engine.step()
    engine.add(make_request(40, max_tokens=1))
    engine.step()
    first, second = records
    assert (first.step, second.step) == (1, 2)
    assert first.time == 0.0
    assert first.execute_seconds == pytest.approx(0.044)
    assert second.time == pytest.approx(0.044)
    assert second.execute_seconds == pytest.approx(0.056)
    assert (first.num_decode_tokens, first.num_prefill_tokens, first.num_outputs) == (0, 4, 1)
    assert (second.num_decode_tokens, second.num_prefill_tokens, second.num_outputs) == (1, 15, 1)
    assert second.token_budget == 16
    assert (second.num_running, second.num_waiting) == (2, 0)
    assert (second.num_blocks, second.num_used_blocks) == (19, 6)
    assert second.num_unused_slots == 3 + 25  # 5 of 8 slots; 15 of 40


def test_a_step_of_hidden_rows_only_is_recorded(timed, make_request):
    engine, records = timed()
    engine.add(make_request(8, wants_remote_kv=True))
    engine.step()
    assert records == []  # nothing was computed
    engine._timer._clock.advance(3.0)  # idle, asleep
    engine.add_hidden("r0", [7.0])
    engine.execute(SchedulerOutput())
    [record] = records
    assert record.time == pytest.approx(3.0)
    assert record.schedule_seconds == 0.0
    assert (record.num_hidden_rows, record.num_outputs, record.num_scheduled_requests) == (1, 1, 0)
    assert record.num_waiting_for_kv == 1
    engine.abort("r0")
    engine.release_reservation("r0")


def test_preemptions_and_swaps_are_recorded(timed, make_request):
    engine, records = timed(num_blocks=7, num_host_blocks=6, preemption_mode="swap")
    for _ in range(2):
        engine.add(make_request(15, max_tokens=20))
    while engine.scheduler.requests:
        engine.step()
    [out] = [record for record in records if record.num_preempted]
    assert out.num_swap_preempted == 1
    assert out.num_swapped_out == 3
    assert out.swap_seconds == pytest.approx(0.015)
    assert out.num_swapped == 1
    assert [record.num_swapped_in for record in records if record.num_swapped_in]
    assert records[-1].num_used_blocks == 0


def test_costs_are_learned_from_steps(timed, make_request):
    engine, _ = timed(num_blocks=7, num_host_blocks=6, preemption_mode="auto")
    for _ in range(2):
        engine.add(make_request(15, max_tokens=20))
    while engine.scheduler.requests:
        engine.step()
    costs = engine.scheduler.costs
    assert costs.compute.seconds_per_item == pytest.approx(0.001, rel=1e-3)
    assert costs.swap.seconds_per_item == pytest.approx(0.005, rel=1e-3)
    assert not costs.prefers_swap(8, 1)
    assert costs.prefers_swap(11, 1)


def test_a_failed_step_computes_again_what_it_swapped_out(make_engine, make_request, runner):
    engine = make_engine(num_blocks=7, num_host_blocks=6, preemption_mode="swap")
    for _ in range(2):
        engine.add(make_request(15, max_tokens=20))
    while True:
        batch, _ = engine.schedule()
        if batch.swap_outs:
            runner.error = RuntimeError("no memory")
        events = engine.execute(batch)
        if batch.swap_outs:
            break
    assert [type(event) for event in events] == [FailedEvent]
    [left] = engine.scheduler.requests.values()
    assert left.status is RequestStatus.PREEMPTED
    engine.scheduler.check_integrity()
    while engine.scheduler.requests:
        engine.step()
    assert len(left.output_token_ids) == 20
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().num_free_host_blocks == 6
