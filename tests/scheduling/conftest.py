"""Doubles for scheduling tests: factories, and a runner that keeps a shadow of the KV memory.

The shadow stores in each slot a digest of all tokens up to it. A step that reads a slot whose content is not that of
its own tokens, writes into a block that others use, or writes a slot twice, fails the test; and since the next token is
a function of that digest, right outputs prove that scheduling lost, repeated and mixed up nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from common.kv_layout import KVLayout
from common.messages import TokenLogprobs
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.beam_search import BeamSearch, Hypothesis
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import (
    CancelCheck,
    Inbox,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    Scored,
    StepResult,
)
from common.scheduling.scheduler import Scheduler

VOCAB_SIZE = 97
BLOCK_SIZE = 8


def layout(block_size: int = BLOCK_SIZE) -> KVLayout:
    return KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32", model_fingerprint="test"
    )


def digests(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """What the shadow memory holds for each position."""
    digest, chain = sum(salt.encode()), []
    for token_id in token_ids:
        digest = hash((digest, token_id))
        chain.append(digest)
    return chain


def draw(digest: int, choice: int = 0) -> int:
    return (digest + 31 * choice) % VOCAB_SIZE


def next_token(token_ids: Sequence[int], salt: str = "", choice: int = 0) -> int:
    return draw(digests(token_ids, salt)[-1], choice)


def expected_outputs(prompt: Sequence[int], count: int, salt: str = "", choice: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, salt, choice))
    return tokens[len(prompt) :]


def candidates(digest: int, count: int) -> TokenLogprobs:
    """The most likely next tokens of a beam."""
    ids = [(digest + 13 * i) % VOCAB_SIZE for i in range(count)]
    logprobs = sorted(-0.5 - (digest >> i) % 97 / 50 for i in range(count))[::-1]
    return TokenLogprobs(logprobs[0], ids, logprobs)


def expected_beams(request: Request, max_outputs: int) -> list[Hypothesis]:
    search = BeamSearch(request.params, request.stop_token_ids, max_outputs)
    while not search.is_over:
        chains = [digests([*request.prompt_token_ids, *ids], request.cache_salt) for ids in search.running_token_ids]
        search.advance([candidates(chain[-1], search.num_candidates) for chain in chains])
    return search.results(search.width)


class ShadowRunner:
    """Executes steps on shadow memory and checks every rule of `output.py`."""

    digests = staticmethod(digests)
    next_token = staticmethod(next_token)
    expected_outputs = staticmethod(expected_outputs)
    expected_beams = staticmethod(expected_beams)

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.cache.block_size
        self.memory: dict[int, int] = {}
        self.host_memory: dict[int, int] = {}
        self.batches: list[SchedulerOutput] = []

    def step(self, inbox: Inbox | None = None) -> SchedulerOutput:
        """schedule, execute, update."""
        batch = self.scheduler.schedule()
        self.scheduler.update(batch, self.execute(batch, inbox, lambda: False))
        self.scheduler.check_integrity()
        return batch

    def execute(self, batch: SchedulerOutput, inbox: Inbox | None, should_cancel: CancelCheck) -> StepResult:
        self.batches.append(batch)
        assert batch.num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(batch.scheduled) <= self.scheduler.config.max_num_seqs
        self._copy(batch.swap_outs, self.memory, self.host_memory)
        self._copy(batch.swap_ins, self.host_memory, self.memory)
        self._copy(batch.copies, self.memory, self.memory)
        written: set[int] = set()
        for rows in batch.scheduled:
            self._write(rows, written)
        sampled, hidden, scored = {}, {}, []
        for rows in batch.scheduled:
            digest = self._read(rows)
            if rows.is_last_chunk and rows.request.is_compute_only:
                hidden[rows.request.request_id] = np.array([[draw(digest)]], np.float32)
            elif rows.is_last_chunk:
                sampled |= self._sample(rows.request, digest)
            if rows.request.is_scoring:
                scored += self._score(rows)
        for row in inbox.take() if inbox else ():
            assert not sampled.keys() & {request.request_id for request in row.request.samplers}
            sampled |= self._sample(row.request, row.row[0])
        return StepResult(sampled=sampled, hidden=hidden, scored=scored)

    def _sample(self, request: Request, digest: int) -> dict[str, SampledToken]:
        return {
            one.request_id: SampledToken(draw(digest, one.choice))
            if one.search is None
            else SampledToken(0, candidates(digest, one.search.num_candidates))
            for one in request.samplers
        }

    def _score(self, rows: ScheduledRequest) -> list[Scored]:
        request = rows.request
        first = max(rows.start + 1, request.num_scored_tokens)
        end = min(rows.start + rows.num_tokens + 1, request.num_prompt_tokens)
        assert first == request.num_scored_tokens or first >= end, "hidden states of prompt tokens are missing"
        logprobs = [TokenLogprobs(0.0 - position) for position in range(first, end)]
        return [Scored(request, first, logprobs)] if logprobs else []

    def fetch(self, request: Request, block_ids: Sequence[int], start: int, end: int) -> None:
        """Another node's KV of positions start .. end - 1 arrives."""
        chain = digests(request.all_token_ids[:end], request.cache_salt)
        for position in range(start, end):
            self.memory[self._slot(block_ids, position)] = chain[position]

    def _copy(self, pairs: Sequence[tuple[int, int]], source: dict[int, int], target: dict[int, int]) -> None:
        for from_block, to_block in pairs:
            for offset in range(self.block_size):
                target[to_block * self.block_size + offset] = source.get(from_block * self.block_size + offset, 0)

    def _slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, rows: ScheduledRequest, written: set[int]) -> None:
        request, end = rows.request, rows.start + rows.num_tokens
        assert rows.num_tokens > 0
        assert rows.start == request.num_computed_tokens
        assert end <= request.num_tokens
        assert rows.is_last_chunk == (end == request.num_tokens)
        if rows.recompute_only:
            assert rows.num_tokens == 1
            assert rows.is_last_chunk
            return
        chain = digests(request.all_token_ids[:end], request.cache_salt)
        for position in range(rows.start, end):
            slot = self._slot(rows.block_table, position)
            block_id = slot // self.block_size
            assert block_id != 0, "the null block is in a table"
            assert self.scheduler.cache.pool.ref_count(block_id) == 1, "a shared block is written"
            assert slot not in written, "a slot is written twice in a step"
            written.add(slot)
            self.memory[slot] = chain[position]

    def _read(self, rows: ScheduledRequest) -> int:
        request, end = rows.request, rows.start + rows.num_tokens
        chain = digests(request.all_token_ids[:end], request.cache_salt)
        for position in range(end):
            found = self.memory.get(self._slot(rows.block_table, position))
            assert found == chain[position], f"{request}: wrong KV at position {position}"
        return chain[-1]


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    def make(
        num_blocks: int = 100,
        *,
        block_size: int = BLOCK_SIZE,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        **config: object,
    ) -> Scheduler:
        config = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 512} | config
        cache = KVCacheManager(
            layout(block_size),
            num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        return Scheduler(SchedulerConfig(**config), cache)

    return make


@pytest.fixture
def make_runner() -> Callable[[Scheduler], ShadowRunner]:
    return ShadowRunner


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request named r0, r1, ... with a prompt of its own (or one given), `max_tokens` outputs and no end token."""
    counter = iter(range(10**6))

    def make(
        num_tokens: int = 8, max_tokens: int | None = 4, *, prompt: Sequence[int] = (), **fields: object
    ) -> Request:
        number = next(counter)
        prompt = prompt or [1000 * (number + 1) + i for i in range(num_tokens)]
        params = None if max_tokens is None else SamplingParams(max_tokens=max_tokens, temperature=0.0)
        fields.setdefault("params", params)
        fields.setdefault("request_id", f"r{number}")
        return Request(prompt_token_ids=list(prompt), **fields)

    return make


@pytest.fixture
def assert_empty() -> Callable[[Scheduler], None]:
    """Nothing held: no request, every reference count 0, books in order."""

    def check(scheduler: Scheduler) -> None:
        assert not scheduler.requests
        assert scheduler.num_held_requests == 0
        assert scheduler.cache.pool.num_used == 0
        scheduler.check_integrity()

    return check


@pytest.fixture
def make_samples(make_request: Callable[..., Request]) -> Callable[..., tuple[Request, list[Request]]]:
    """A prompt and its choices, as many as `lengths`; choice i has lengths[i] outputs."""

    def make(lengths: Sequence[int], num_tokens: int = 20, **fields: object) -> tuple[Request, list[Request]]:
        prompt = make_request(num_tokens, max(lengths), **fields)
        prompt.choices = [
            Request(f"{prompt.request_id}/{i}", prompt.prompt_token_ids, SamplingParams(max_tokens=length), choice=i)
            for i, length in enumerate(lengths)
        ]
        return prompt, list(prompt.choices)

    return make


@pytest.fixture
def make_scene(make_scheduler: Callable[..., Scheduler]) -> Callable[..., tuple[Scheduler, ShadowRunner]]:
    """A scheduler as `make_scheduler` makes it, and its runner."""

    def make(num_blocks: int = 100, **config: object) -> tuple[Scheduler, ShadowRunner]:
        scheduler = make_scheduler(num_blocks, **config)
        return scheduler, ShadowRunner(scheduler)

    return make
