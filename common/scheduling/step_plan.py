"""A step while the scheduler decides it. Knows no rule; `output` freezes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.request import Request
from common.scheduling.kv_cache_manager import Copy
from common.scheduling.output import ScheduledRequest, SchedulerOutput


@dataclass
class StepPlan:
    """A step being decided.

    token_budget: rows that are left of the step's `max_num_rows`.
    num_partial: requests that after this step will still lack more than the one token that each step brings.
    num_promised_blocks: blocks that will come back from reservations, less what was already counted on; None until
        somebody asks.
    """

    max_num_rows: int
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
    is_short_of_blocks: bool = False

    def __post_init__(self) -> None:
        self.token_budget = self.max_num_rows

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
            token_budget=self.max_num_rows,
        )
