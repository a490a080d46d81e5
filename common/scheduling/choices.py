"""Several answers to one prompt: how they come to be, share its blocks, and end. Draws nothing, decides no step.

    samples   add: n choices ---------.                                    each an ordinary request from then on
                                       +-> WAITING_FOR_PROMPT --fork--> RUNNING ...
    beams     first candidates: w ----'                                    |  in step: all go on when all can

A prompt's blocks are shared with its choices by reference; whoever writes into a shared block first gets a copy. Beams
run together or not at all: one that waited for blocks that another one holds might wait for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from common.request import FinishReason, Request, RequestStatus
from common.scheduling.beam_search import BeamSearch, Continuation
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.queues import Queues


class Choices:
    def __init__(self, queues: Queues, cache: KVCacheManager) -> None:
        self._queues = queues
        self._cache = cache
        self._beam_numbers = itertools.count(1)

    # --- samples ----------------------------------------------------------------------------------------------------

    def add(self, prompt: Request) -> None:
        """The prompt is queued: its choices wait for it."""
        for number, choice in enumerate(prompt.choices, 1):
            self._join(prompt, choice, number)

    def num_first_blocks(self, prompt: Request) -> int:
        """Blocks that its choices will write their outputs into as soon as they run, beside those that they share."""
        if not prompt.is_shared_prompt:
            return 0
        num_shared = prompt.num_tokens // self._cache.block_size
        lengths = (max(choice.num_tokens, prompt.num_tokens + 1) for choice in prompt.choices)
        missing = sum(self._cache.layout.num_blocks_for(length) - num_shared for length in lengths)
        return max(missing, prompt.num_sequences)

    def fork(self, prompt: Request) -> list[Request]:
        """Its running choices: all KV of the prompt is theirs."""
        self._queues.running.remove(prompt)
        for choice in prompt.choices:
            self._share_blocks(prompt, choice)
        self._cache.free(prompt.request_id)
        prompt.status = RequestStatus.FORKED
        return list(prompt.choices)

    def leave(self, choice: Request) -> Request | None:
        """The choice has ended; its prompt, if that was the last one."""
        prompt = choice.parent
        if prompt is None or choice not in prompt.choices:
            return None
        prompt.choices.remove(choice)
        return None if prompt.choices else prompt

    # --- beams ------------------------------------------------------------------------------------------------------

    def advance(self, prompt: Request) -> bool:
        """Lets the beams go on by a token when the candidates of all of them are known; False when none goes on."""
        search, beams = prompt.beam_search, prompt.choices or [prompt]
        assert isinstance(search, BeamSearch)
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        if len(candidates) < len(beams):
            return True
        for beam in beams:
            beam.candidates = None
        prompt.choices = list(self._continue(prompt, beams, search.advance(candidates)))
        for beam in beams:
            if beam is not prompt and beam not in prompt.choices:
                self._drop(beam)
        return bool(prompt.choices)

    def _continue(self, prompt: Request, beams: list[Request], continuations: list[Continuation]) -> Iterator[Request]:
        """A beam's first continuation goes on in its place, the others fork from it (before it has the new token)."""
        heads: list[Request] = []
        for continuation in continuations:
            beam = beams[continuation.parent]
            heads.append(self._fork_beam(prompt, beam) if beam is prompt or beam in heads else beam)
        for head, continuation in zip(heads, continuations, strict=True):
            head.append_output(continuation.token_id)
            yield head

    def _fork_beam(self, prompt: Request, beam: Request) -> Request:
        number = next(self._beam_numbers)
        child = Request(
            request_id=f"{prompt.request_id}/beam{number}",
            prompt_token_ids=prompt.prompt_token_ids,
            params=prompt.params,
            output_token_ids=[] if beam is prompt else list(beam.output_token_ids),
            stop_token_ids=prompt.stop_token_ids,
            max_num_tokens=prompt.max_num_tokens,
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
            priority=prompt.priority,
            arrival_time=prompt.arrival_time,
        )
        self._join(prompt, child, number)
        if beam is not prompt:
            self._share_blocks(beam, child)
        return child

    def _drop(self, beam: Request) -> None:
        """Other beams are more likely: it ends without a word."""
        self._queues.remove(beam)
        self._cache.free(beam.request_id)
        beam.status, beam.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
        del self._queues.requests[beam.request_id]

    def withdraw(self, prompt: Request) -> None:
        """The running beams of a search give up their blocks; they wait until their prompt's KV is in again."""
        for beam in prompt.choices:
            self._queues.running.remove(beam)
            self._cache.free(beam.request_id)
            beam.status, beam.num_computed_tokens, beam.candidates = RequestStatus.WAITING_FOR_PROMPT, 0, None

    # --- parts ------------------------------------------------------------------------------------------------------

    def _join(self, prompt: Request, choice: Request, number: int) -> None:
        choice.parent = prompt
        choice.precedence = (*prompt.precedence[:2], number)
        choice.num_resets_at_start = prompt.num_resets_at_start
        choice.status = RequestStatus.WAITING_FOR_PROMPT
        self._queues.requests[choice.request_id] = choice

    def _share_blocks(self, source: Request, choice: Request) -> None:
        """It runs from the source's filled tokens on. At least its last token, drawn already, is beyond them."""
        self._cache.fork(source, choice)
        choice.block_hashes = list(source.block_hashes)
        choice.num_cached_tokens = source.num_cached_tokens
        choice.num_computed_tokens = self._cache.num_filled_tokens(choice.request_id)
        self._queues.run(choice)
