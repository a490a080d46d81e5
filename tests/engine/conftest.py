"""A scripted runner and engines around it: everything about steps, events and threads, without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from common.clock import Clock
from common.engine.async_engine import AsyncEngine
from common.engine.engine import Engine
from common.engine.events import Event
from common.kv_layout import KVLayout
from common.messages import TokenLogprobs
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import CancelCheck, Inbox, SampledToken, SchedulerOutput, Scored, StepResult
from common.scheduling.scheduler import Scheduler

WAIT_SECONDS = 20.0


class ScriptedRunner:
    """Output i of request r is scripts[r][i], or 100 + i without a script. A hidden row samples what it says.

    The token after position p of a prompt has log-probability -p, of rank 0; by a hidden row minus what that says, of
    rank 1.

    gate: when set, a step waits there, between "layers", until it is opened or the step is cancelled.
    error: raised by the next step.
    """

    def __init__(self) -> None:
        self.scripts: dict[str, list[int]] = {}
        self.batches: list[SchedulerOutput] = []
        self.gate: threading.Event | None = None
        self.is_inside = threading.Event()
        self.error: Exception | None = None
        self.num_cancelled = 0

    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult:
        self.batches.append(batch)
        if self.gate is not None and not self._pass_gate(should_cancel):
            self.num_cancelled += 1
            return StepResult(is_cancelled=True)
        scored = [self._score(r.request, r.start, range(r.start, r.start + r.num_tokens), 0) for r in batch.scheduled]
        scored += [self._score(r.request, r.start, r.rows[:, 0], 1) for r in inbox.take_prompt_rows()]
        sampled = {
            one.request_id: SampledToken(int(row.row[0])) for row in inbox.take() for one in row.request.samplers
        }
        hidden = {}
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for rows in batch.scheduled:
            request = rows.request
            if request.is_compute_only:
                count = rows.num_tokens if request.want_all_hidden else int(rows.is_last_chunk)
                if count:
                    hidden[request.request_id] = np.full((count, 2), rows.start, np.float32)
            elif rows.is_last_chunk:
                sampled |= {
                    one.request_id: SampledToken(self._next(one), self._candidates(one)) for one in request.samplers
                }
        return StepResult(sampled=sampled, hidden=hidden, scored=[piece for piece in scored if piece.logprobs])

    def _score(self, request: Request, start: int, values: Iterable[float], rank: int) -> Scored:
        first = request.num_scored_tokens
        if not request.is_scoring:
            return Scored(request, first, [])
        logprobs = [
            TokenLogprobs(-float(value), rank=rank)
            for position, value in enumerate(values, start + 1)
            if first <= position < request.num_prompt_tokens
        ]
        return Scored(request, max(first, start + 1), logprobs)

    def _candidates(self, request: Request) -> TokenLogprobs | None:
        """Each of them less likely than the one before."""
        if request.search is None:
            return None
        count = request.search.num_candidates
        return TokenLogprobs(-1.0, list(range(100, 100 + count)), [-1.0 - i for i in range(count)])

    def _pass_gate(self, should_cancel: CancelCheck) -> bool:
        self.is_inside.set()
        while not self.gate.wait(0.001):
            if should_cancel():
                return False
        return True

    def _next(self, request: Request) -> int:
        index = len(request.output_token_ids)
        script = self.scripts.get(request.request_id, [])
        return script[index] if index < len(script) else 100 + index


class Recorder:
    """Collects events; waits for one without sleeping."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        assert events
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def of(self, kind: type[Event], request_id: str | None = None) -> list[Event]:
        return [e for e in list(self.events) if isinstance(e, kind) and request_id in (None, e.request_id)]

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), f"did not come; last: {self.events[-3:]}"

    def wait_for_end(self, *request_ids: str) -> None:
        """Until each has a last output."""

        def ended() -> bool:
            return all(any(getattr(e, "finish_reason", None) for e in self.of(Event, i)) for i in request_ids)

        self.wait_for(ended)

    def tokens(self, request_id: str) -> list[int]:
        return [e.token_id for e in self.events if e.request_id == request_id and hasattr(e, "token_id")]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def make_engine(runner: ScriptedRunner) -> Callable[..., Engine]:
    def make(num_blocks: int = 100, *, num_host_blocks: int = 0, clock: Clock | None = None, **config: Any) -> Engine:
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=8, dtype="float32", model_fingerprint="test"
        )
        config = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "max_model_len": 256} | config
        cache = KVCacheManager(layout, num_blocks, num_host_blocks=num_host_blocks)
        return Engine(Scheduler(SchedulerConfig(**config), cache), runner, clock=clock)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    counter = iter(range(10**6))

    def make(num_tokens: int = 8, max_tokens: int | None = 3, **fields: object) -> Request:
        number = next(counter)
        if max_tokens is not None:
            fields.setdefault("params", SamplingParams(max_tokens=max_tokens))
        fields.setdefault("request_id", f"r{number}")
        fields.setdefault("prompt_token_ids", [1000 * (number + 1) + i for i in range(num_tokens)])
        return Request(**fields)

    return make


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_async_engine(
    make_engine: Callable[..., Engine], recorder: Recorder, runner: ScriptedRunner
) -> Iterator[Callable[..., AsyncEngine]]:
    """Started engines; at the end each holds nothing and stops."""
    engines: list[AsyncEngine] = []

    def make(num_blocks: int = 100, **config: int) -> AsyncEngine:
        engine = AsyncEngine(make_engine(num_blocks, **config), recorder)
        engines.append(engine)
        engine.start()
        return engine

    yield make
    if runner.gate is not None:
        runner.gate.set()
    for engine in engines:
        if engine.failure is None:
            engine.check_integrity()
            assert engine.stats().num_free_blocks == engine.stats().num_blocks, "blocks are held"
        engine.stop(WAIT_SECONDS)
        assert not engine.is_alive
