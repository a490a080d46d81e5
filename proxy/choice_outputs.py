"""What came of one choice of a request, and what of it was not taken yet. Knows no node and no leg."""

from __future__ import annotations

from common.messages import RequestOutput, TokenLogprobs
from common.text.answer import FinishReason, OutputBatch


class ChoiceOutputs:
    """has_logprobs: the request asked for them; then each output has one, whatever the node sent."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._num_taken = 0
        self._logprobs: list[TokenLogprobs] = []  # of the outputs that were not taken yet

    @property
    def next_index(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, output: RequestOutput) -> int:
        """Takes what is new of outputs that begin at or before the next index; how many that are."""
        num_known = self.next_index - output.index
        new_ids = output.token_ids[num_known:]
        if new_ids and self._has_logprobs:
            self._append_logprobs((output.logprobs or [])[num_known:], len(new_ids))
        self.token_ids += new_ids
        return len(new_ids)

    def take(self) -> OutputBatch | None:
        """What came since the last time; None when nothing did and the choice goes on."""
        token_ids = self.token_ids[self._num_taken :]
        if not token_ids and not self.is_finished:
            return None
        logprobs, self._logprobs = self._logprobs, []
        self._num_taken = len(self.token_ids)
        return OutputBatch(token_ids, logprobs or None, self.finish_reason)

    def _append_logprobs(self, logprobs: list[TokenLogprobs], count: int) -> None:
        missing = [TokenLogprobs(float("nan"))] * (count - len(logprobs))
        self._logprobs += [*logprobs[:count], *missing]
