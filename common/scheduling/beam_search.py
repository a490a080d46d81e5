"""Which beginnings of an answer beam search goes on with, which have ended, and when the search is over.

Pure: it is given the most likely next tokens of every running beam and decides. Knows no block, no clock and no model;
who forks block tables by what it says is the scheduler.

    beams = BeamSearch(params, end_token_ids, max_outputs)
    while not beams.is_over:
        beams.advance(<the num_candidates most likely tokens after each running beam>)
    beams.results(count)

The rules, and so ids and scores, are those of transformers 5 (`GenerationMixin._beam_search`, `num_beams` = width):

- all continuations of all beams are ranked by their sum of log-probabilities. One with an end token has ended, and
  counts if it is among the first `width` of this ranking; the first `width` others run on;
- in the last step each of the first `width` counts, with or without an end token;
- score = sum / (number of outputs, the end token included) ** length_penalty; the best `width` of the ended are kept;
- while fewer than `width` have ended the search goes on, then `early_stopping` says when it stops; beams that still run
  at that moment do not count.

Different: sums are float64, ties go to the beam ranked higher before and then to the candidate listed first, and a beam
that is not there (fewer than `width` continuations exist) is none, where transformers has one with a score of -1e9.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.messages import TokenLogprobs
from common.request import FinishReason
from common.sampling_params import SamplingParams


class Continuation(NamedTuple):
    """A beam of the step before and one token more.

    parent: index into the beams that ran before (0, the prompt, in the first step).
    cumulative_logprob: sum of the log-probabilities of all its outputs.
    logprobs: of the new token, with as many of the most likely ones as the request wants.
    """

    parent: int
    token_id: int
    cumulative_logprob: float
    logprobs: TokenLogprobs


class Hypothesis(NamedTuple):
    """A beam that has ended. stop_reason: the token that ended it if the request itself named it (`stop_rules.py`)."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Beam:
    """The last link of a beam; beams share their beginnings, so that a step costs the same however long they are."""

    beginning: _Beam | None
    last: Continuation

    def outputs(self) -> list[Continuation]:
        found, beam = [self.last], self.beginning
        while beam is not None:
            found.append(beam.last)
            beam = beam.beginning
        return found[::-1]


class _Ended(NamedTuple):
    beam: _Beam
    score: float


class BeamSearch:
    """One request's beams.

    params: with beam_search set. end_token_ids: every token that ends a beam, params.stop_token_ids included.
    max_outputs: beams of so many outputs have ended, at least 1.
    """

    def __init__(self, params: SamplingParams, end_token_ids: frozenset[int], max_outputs: int) -> None:
        assert params.beam_search is not None
        assert max_outputs >= 1
        assert end_token_ids.issuperset(params.stop_token_ids)
        self._rules = params.beam_search
        self._num_logprobs = params.logprobs or 0
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_token_ids = end_token_ids
        self._max_outputs = max_outputs
        self._num_outputs = 0
        self._running: list[_Beam | None] = [None]  # the prompt
        self._ended: list[_Ended] = []  # best first

    @property
    def width(self) -> int:
        return self._rules.width

    @property
    def num_candidates(self) -> int:
        """How many of the most likely tokens `advance` needs of each beam (or the whole vocabulary, if that is less).

        Even if all end tokens are among them, `width` others are left. Those are enough: no beam has more continuations
        than `width` among the best ones. (transformers takes as many of all beams together as end tokens could need.)
        """
        return max(self.width + len(self._end_token_ids), self._num_logprobs)

    @property
    def is_over(self) -> bool:
        return not self._running

    @property
    def running_token_ids(self) -> list[list[int]]:
        """The outputs of each running beam, best beam first; before the first step one beam without outputs."""
        return [[output.token_id for output in beam.outputs()] if beam else [] for beam in self._running]

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        """The next running beams, best first; none when the search is over.

        candidates: of each running beam in order, its most likely next tokens as `top_token_ids` and `top_logprobs`,
            best first.
        """
        assert len(candidates) == len(self._running)
        self._num_outputs += 1
        running, ended = self._select(candidates)
        if ended:
            merged = sorted(self._ended + ended, key=lambda one: -one.score)  # stable: earlier ones first
            self._ended = merged[: self.width]
        self._running = [*running] if running and self._can_improve(running[0]) else []
        return [beam.last for beam in running] if self._running else []

    def results(self, count: int) -> list[Hypothesis]:
        """The best that have ended, best first; fewer than `count` only if the vocabulary allows no more."""
        return [self._hypothesis(ended) for ended in self._ended[:count]]

    def _select(self, candidates: Sequence[TokenLogprobs]) -> tuple[list[_Beam], list[_Ended]]:
        width, is_last_step = self.width, self._num_outputs == self._max_outputs
        running: list[_Beam] = []
        ended: list[_Ended] = []
        for rank, continuation in enumerate(self._ranking(candidates)):
            if len(running) == width:
                break
            beam = _Beam(self._running[continuation.parent], continuation)
            if not is_last_step and continuation.token_id not in self._end_token_ids:
                running.append(beam)
            elif rank < width:
                ended.append(_Ended(beam, self._score(continuation.cumulative_logprob, self._num_outputs)))
        return running, ended

    def _ranking(self, candidates: Sequence[TokenLogprobs]) -> Iterator[Continuation]:
        """All continuations, best first, made as they are asked for. A merge prefers the earlier beam where two tie."""
        beams = [self._continuations(parent, tokens) for parent, tokens in enumerate(candidates)]
        return heapq.merge(*beams, key=lambda continuation: -continuation.cumulative_logprob)

    def _continuations(self, parent: int, candidates: TokenLogprobs) -> Iterator[Continuation]:
        beam = self._running[parent]
        cumulative = beam.last.cumulative_logprob if beam else 0.0
        wanted = self._num_logprobs
        top_token_ids, top_logprobs = candidates.top_token_ids[:wanted], candidates.top_logprobs[:wanted]
        for token_id, logprob in zip(candidates.top_token_ids, candidates.top_logprobs, strict=True):
            logprobs = TokenLogprobs(logprob, top_token_ids, top_logprobs)
            yield Continuation(parent, token_id, cumulative + logprob, logprobs)

    def _can_improve(self, best: _Beam) -> bool:
        """Whether going on may change the result; estimated as `early_stopping` says, from the best running beam."""
        rules = self._rules
        if len(self._ended) < self.width:
            return True
        if rules.early_stopping is True:
            return False
        is_longer_better = rules.length_penalty > 0.0  # sums are negative
        length = self._max_outputs if rules.early_stopping == "never" and is_longer_better else self._num_outputs
        return self._score(best.last.cumulative_logprob, length) > self._ended[-1].score

    def _score(self, cumulative_logprob: float, num_outputs: int) -> float:
        try:
            divisor = max(math.pow(num_outputs, self._rules.length_penalty), sys.float_info.min)
        except OverflowError:  # a thousand outputs to the power of 1000 are no float
            divisor = sys.float_info.max
        return cumulative_logprob / divisor

    def _hypothesis(self, ended: _Ended) -> Hypothesis:
        outputs, last = ended.beam.outputs(), ended.beam.last
        return Hypothesis(
            token_ids=[output.token_id for output in outputs],
            logprobs=[output.logprobs for output in outputs],
            cumulative_logprob=last.cumulative_logprob,
            score=ended.score,
            finish_reason=FinishReason.STOP if last.token_id in self._end_token_ids else FinishReason.LENGTH,
            stop_reason=last.token_id if last.token_id in self._stop_token_ids else None,
        )
