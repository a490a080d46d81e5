"""What the scheduler asks of a step, and what the step gives back. Plain data; no torch.

The scheduler, the runner and the engine meet here: `Scheduler.schedule() -> SchedulerOutput`,
`Runner.execute(SchedulerOutput, ...) -> StepResult`, `Scheduler.update(SchedulerOutput, StepResult)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from common.messages import TokenLogprobs
    from common.request import Request


Copy = tuple[int, int]
"""(source block, destination block)."""


class ScheduledRequest(msgspec.Struct, frozen=True, eq=False):
    """One request's rows of a step.

    start: position of the first row (= num_computed_tokens when scheduled).
    num_tokens: rows; token ids are request.all_token_ids[start : start + num_tokens].
    block_table: block ids from position 0 on, covering at least start + num_tokens slots. A row at position p is
        written to slot block_table[p // block_size] * block_size + p % block_size and attends positions 0 .. p.
    is_last_chunk: after this step the request has caught up: sample an output (or, for a computation, return the
        last row's hidden state).
    recompute_only: the single row's KV is already in the (possibly shared) block; it is read and not written: its
        KV write goes to block 0, the null block, and attention reads the cached value.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: Sequence[int]
    is_last_chunk: bool
    recompute_only: bool = False


@dataclass(frozen=True)
class SchedulerOutput:
    """One flat batch, and bookkeeping that happened while it was made.

    scheduled: rows to compute; may be empty.
    started: requests that got their blocks for the first time, to be computed here or only looked up.
    swap_outs: (pool block, host block) pairs to copy first of all: what follows may write into these pool blocks.
    swap_ins: (host block, pool block) pairs to copy next.
    copies: (source block, destination block) pairs to copy before the forward pass (copy-on-write).
    reserved: requests that now wait for another node's KV, their blocks allocated.
    revoked: reservations that must give up their blocks (blocks stay theirs until `release_reservation`).
    preempted: requests that gave up their blocks, those of them that were swapped out included (their status tells).
    resumed: requests that got their blocks back from the host.
    token_budget: most rows that this step could have had.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    swap_outs: tuple[Copy, ...] = ()
    swap_ins: tuple[Copy, ...] = ()
    copies: tuple[Copy, ...] = ()
    started: tuple[Request, ...] = ()
    reserved: tuple[Request, ...] = ()
    revoked: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    resumed: tuple[Request, ...] = ()
    token_budget: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def needs_runner(self) -> bool:
        """There are rows to compute or blocks to copy."""
        return bool(self.scheduled or self.swap_outs or self.swap_ins or self.copies)

    @property
    def is_idle(self) -> bool:
        """Nothing was decided: until something from outside comes, the next schedule will decide nothing either."""
        return not (self.needs_runner or self.started or self.reserved or self.revoked or self.preempted)


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprobs: TokenLogprobs | None = None


class Scored(msgspec.Struct, frozen=True, eq=False):
    """Log-probabilities of a prompt's tokens from position `start` on, at least 1."""

    request: Request
    start: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True)
class StepResult:
    """sampled: by request id, for the `samplers` of every caught-up request that has params and of submitted hidden
        rows. Of a beam (or the prompt of a search) only the log-probabilities of its candidates count.
    hidden: by request id, float32 [num_rows, hidden_size] after the last norm: the last row of a caught-up
        computation, or all rows of this chunk when `want_all_hidden`.
    is_cancelled: the step was left between two layers; nothing in it counts as computed (its copies were made).
    swap_seconds: how long its swap_outs and swap_ins took.
    failed: by request id, why a request that owes an output gets none and ends; it is not in `sampled`.
    scored: log-probabilities of prompt tokens, of requests that are scoring.
    """

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    hidden: dict[str, np.ndarray] = field(default_factory=dict)
    is_cancelled: bool = False
    swap_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    scored: Sequence[Scored] = ()


@dataclass(frozen=True)
class Booked:
    """What came of a step. outputs: (request, the output that was appended to it), in batch order.
    searches: prompts of beam searches that are over."""

    outputs: list[tuple[Request, SampledToken]] = field(default_factory=list)
    searches: list[Request] = field(default_factory=list)


@dataclass(frozen=True)
class HiddenRow:
    """A hidden state computed elsewhere, from which this engine samples the request's next output.

    row: float32 [hidden_size], after the model's last norm.
    """

    request: Request
    row: np.ndarray


@dataclass(frozen=True)
class PromptRows:
    """Hidden states computed elsewhere, of a prompt's tokens from position `start` on: each tells what log-probability
    the token after it has.

    rows: float32 [num_rows, hidden_size], after the model's last norm.
    """

    request: Request
    start: int
    rows: np.ndarray


class Runner(Protocol):
    """Executes steps: the model runner, or in tests a scripted one."""

    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult: ...


class Inbox(Protocol):
    def take(self) -> list[HiddenRow]:
        """Rows that arrived so far; polled just before the head so that they join the step in flight."""
        ...

    def take_prompt_rows(self) -> list[PromptRows]:
        """As many as a step may have; taken before the others, since the last ones give an output, too."""
        ...


class CancelCheck(Protocol):
    def __call__(self) -> bool:
        """Polled between layers: True when nobody wants this step's result any more."""
        ...
