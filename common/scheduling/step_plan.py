"""A step while the scheduler decides it. Knows no rule; `output` freezes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.request import Request
from common.scheduling.kv_cache_manager import Copy
from common.scheduling.output import ScheduledRequest, SchedulerOutput


@dataclass
class StepPlan:
    """A step being decided.

    num_promised_blocks: blocks that will come back from reservations, less what was already counted on; None until
        somebody asks.
    """

    token_budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    reserved: list[Request] = field(default_factory=list)
    revoked: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_promised_blocks: int | None = None
    is_short_of_blocks: bool = False

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled=tuple(self.scheduled),
            copies=tuple(self.copies),
            started=tuple(self.started),
            reserved=tuple(self.reserved),
            revoked=tuple(self.revoked),
            preempted=tuple(self.preempted),
        )
