"""2,000 requests of random lengths, parameters and aborts, on a pool so small that preemption is constant."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from common.engine.events import FailedEvent, OutputEvent
from common.request import FinishReason

NUM_REQUESTS = 2000
TIE = 2e-3  # as for the real model: log-probabilities closer than this may change places with the order of summation
MAX_MODEL_LEN = 112
EOS = 1


@dataclass
class Job:
    """One request, and how it ended."""

    prompt: list[int]
    params: dict[str, Any]
    priority: int
    salt: str
    abort_after: int | None
    outputs: list[int]
    logprobs: list[Any]
    reason: FinishReason | None = None


def make_jobs() -> list[Job]:
    rng = random.Random(20261130)
    heads = [[rng.randrange(2, 199) for _ in range(40)] for _ in range(5)]
    return [make_job(rng, heads) for _ in range(NUM_REQUESTS)]


def make_job(rng: random.Random, heads: list[list[int]]) -> Job:
    head = rng.choice(heads)[: rng.choice([0, 0, 0, 8, 33])]  # many share a prefix
    prompt = head + [rng.randrange(2, 199) for _ in range(rng.randint(1, 12))]
    params: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 12, 25, 60, 60]), "logprobs": 2, "temperature": 0.0}
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(2**31)}
        params |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}])
    params |= rng.choice([{}, {"ignore_eos": True}, {"stop_token_ids": tuple(rng.sample(range(2, 199), 4))}])
    abort_after = rng.randint(0, 12) if rng.random() < 0.1 else None
    return Job(prompt, params, rng.choice([0, 0, 0, 1, -1]), rng.choice(["", "", "t"]), abort_after, [], [])


def run(one: Any, jobs: list[Job], *, num_waiting: int, with_aborts: bool, check: Callable[[], None]) -> None:
    """Feeds the jobs so that about `num_waiting` are unfinished at any time."""
    fresh: Iterator[Job] = iter(jobs)
    live: dict[str, Job] = {}
    while True:
        while len(live) < num_waiting and (job := next(fresh, None)) is not None:
            fields = {"priority": job.priority, "cache_salt": job.salt}
            live[one.add(job.prompt, fields=fields, **job.params).request_id] = job
        if not live:
            return
        for event in one.engine.step():
            assert not isinstance(event, FailedEvent), event.error
            if isinstance(event, OutputEvent) and event.request_id in live:
                job = live[event.request_id]
                job.outputs.append(event.token_id)
                job.logprobs.append(event.logprobs)
                if event.finish_reason is not None:
                    job.reason = event.finish_reason
                    del live[event.request_id]
        for request_id, job in list(live.items()):
            if with_aborts and job.abort_after is not None and len(job.outputs) >= job.abort_after:
                one.engine.abort(request_id)
                job.reason = FinishReason.ABORT
                del live[request_id]
        check()


def is_tie(job: Job, index: int) -> bool:
    first, second = job.logprobs[index].top_logprobs
    return bool(first - second < TIE)


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Any) -> list[Job]:
    """The same jobs in a pool where nobody is ever preempted or aborted."""
    from tests.engine_model.conftest import Generator, build

    parts = build(tiny_model_dir, "--num-gpu-blocks-override", "2000", "--max-model-len", str(MAX_MODEL_LEN))
    one = Generator(parts.engine, frozenset({EOS}))
    jobs = make_jobs()
    run(one, jobs, num_waiting=64, with_aborts=False, check=lambda: None)
    assert one.engine.stats().num_preemptions == 0
    return jobs


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "num_requests"),
    [
        ("auto", NUM_REQUESTS // 8),
        *(pytest.param(mode, NUM_REQUESTS, marks=pytest.mark.slow) for mode in ("auto", "recompute", "swap")),
    ],
)
def test_soak(tiny_generator: Callable[..., Any], expected: list[Job], mode: str, num_requests: int) -> None:
    flags = ["--num-gpu-blocks-override", "16", "--block-size", "8", "--max-model-len", str(MAX_MODEL_LEN)]
    flags += ["--max-num-batched-tokens", "48", "--preemption-mode", mode, "--swap-space", "100KiB"]
    one = tiny_generator(*flags)
    jobs = make_jobs()[:num_requests]
    run(one, jobs, num_waiting=24, with_aborts=True, check=one.engine.scheduler.check_integrity)
    one.assert_nothing_held()
    assert not one.engine.scheduler.requests
    stats = one.engine.stats()
    assert stats.num_preemptions > num_requests / 10
    assert (stats.num_swap_preemptions > 0) == (mode != "recompute")

    num_rounded = 0
    for number, (job, right) in enumerate(zip(jobs, expected[:num_requests], strict=True)):
        assert job.reason in ((FinishReason.ABORT,) if job.reason is FinishReason.ABORT else (right.reason,)), number
        different = [i for i, (a, b) in enumerate(zip(job.outputs, right.outputs, strict=False)) if a != b]
        if not different:
            assert job.reason is FinishReason.ABORT or len(job.outputs) == len(right.outputs), f"request {number}"
        elif job.params["temperature"] == 0.0:
            assert is_tie(right, different[0]), f"request {number}, output {different[0]}"
        else:
            num_rounded += 1  # a random number fell between two roundings of one probability
    assert num_rounded <= 2
    assert sum(job.reason is FinishReason.ABORT for job in jobs) > num_requests / 20
