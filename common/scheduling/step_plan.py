"""A step while the scheduler decides it. Knows no rule; `output` freezes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.request import Request
from common.scheduling.output import Copy, ScheduledRequest, SchedulerOutput


@dataclass
class StepPlan:
    """A step being decided.

    token_budget: most rows of the step. num_rows_left: what is left of it.
    num_partial: prompts that this step leaves partly computed.
    num_promised_blocks: blocks that will come back from reservations, less what was already counted on; None until
        somebody asks.
    searches: by the id of a beam search's prompt whether there is room for what its beams write in this step.
    """

    token_budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    swap_outs: list[Copy] = field(default_factory=list)
    swap_ins: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    reserved: list[Request] = field(default_factory=list)
    revoked: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    num_partial: int = 0
    num_promised_blocks: int | None = None
    searches: dict[str, bool] = field(default_factory=dict)
    is_short_of_blocks: bool = False

    def __post_init__(self) -> None:
        self.num_rows_left = self.token_budget

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled=tuple(self.scheduled),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            copies=tuple(self.copies),
            started=tuple(self.started),
            reserved=tuple(self.reserved),
            revoked=tuple(self.revoked),
            preempted=tuple(self.preempted),
            resumed=tuple(self.resumed),
            token_budget=self.token_budget,
        )
