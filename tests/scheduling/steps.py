"""Steps of a scheduler under test, one after the other, and rows from another node that join them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from common.request import FinishReason, Request
from common.scheduling.output import HiddenRow, PromptRows, SchedulerOutput
from common.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.scheduling.conftest import ShadowRunner


class Rows:
    """An inbox of rows that are there when the step polls."""

    def __init__(self, *rows: HiddenRow) -> None:
        self.rows = list(rows)

    def take(self) -> list[HiddenRow]:
        rows, self.rows = self.rows, []
        return rows

    def take_prompt_rows(self) -> list[PromptRows]:
        return []


def step_until(
    runner: ShadowRunner, condition: Callable[[SchedulerOutput], object], limit: int = 1000
) -> SchedulerOutput:
    """The last step."""
    for _ in range(limit):
        batch = runner.step()
        if condition(batch):
            return batch
    raise AssertionError(f"not so after {limit} steps: {runner.scheduler.requests}")


def run_until_done(scheduler: Scheduler, runner: ShadowRunner) -> None:
    if scheduler.requests:
        step_until(runner, lambda _: not scheduler.requests)


def hidden_row(runner: ShadowRunner, request: Request) -> Rows:
    """Of its last token."""
    return Rows(HiddenRow(request, [runner.digests(request.all_token_ids)[-1]]))


def reserve(scheduler: Scheduler, runner: ShadowRunner, prompt: Request) -> list[int]:
    """Its reserved blocks."""
    prompt.wants_remote_kv = True
    scheduler.add(prompt)
    assert runner.step().reserved == (prompt,)
    return list(scheduler.cache.block_ids(prompt.request_id))


def assert_outputs(runner: ShadowRunner, requests: Iterable[Request]) -> None:
    """Each has all its outputs, those of an unpressured run."""
    for request in requests:
        assert request.params is not None
        assert request.params.max_tokens is not None
        assert request.output_token_ids == runner.expected_outputs(
            request.prompt_token_ids, request.params.max_tokens, choice=request.choice
        )
        assert request.finish_reason is FinishReason.LENGTH
