"""Runs engines in this process, step by step: what every comparison needs. Knows no comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import NodeFlags, parse
from common.engine.build import build_engine
from common.engine.engine import Engine
from common.engine.events import Event, FailedEvent, OutputEvent
from common.request import Request
from common.sampling_params import SamplingParams


@dataclass(frozen=True)
class Setup:
    """What all comparisons of a run share. is_quick: sizes for a look, not for figures."""

    model_dir: Path
    num_threads: int
    num_rounds: int
    is_quick: bool

    def build(self, num_slots: int, *flags: str, block_size: int = 16) -> Engine:
        """With room for the KV of so many tokens, and for a request that takes it all."""
        sizes = {
            "--num-threads": self.num_threads,
            "--block-size": block_size,
            "--num-gpu-blocks-override": num_slots // block_size + 1,
            "--max-model-len": num_slots,
        }
        argv = [*flags, *(str(part) for size in sizes.items() for part in size)]
        return build_engine(self.model_dir, parse(NodeFlags, argv), with_head=True).engine


@dataclass(frozen=True)
class Drive:
    """What it took to bring a list of requests to their ends."""

    seconds: float
    num_steps: int
    num_outputs: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_outputs / self.seconds

    @property
    def mean_batch(self) -> float:
        """Outputs of a step."""
        return self.num_outputs / self.num_steps


def make_request(request_id: str, prompt: Sequence[int], num_out: int) -> Request:
    """Greedy, with exactly `num_out` outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    return Request(request_id, prompt, params, max_num_tokens=len(prompt) + num_out)


def drive(engine: Engine, batches: Sequence[Sequence[Request]]) -> Drive:
    """Each batch is added when the one before it has ended to its last request."""
    num_steps = num_outputs = 0
    start = time.perf_counter()
    for batch in batches:
        for request in batch:
            engine.add(request)
        while engine.scheduler.requests:
            num_outputs += count_outputs(engine.step())
            num_steps += 1
    return Drive(time.perf_counter() - start, num_steps, num_outputs)


def seconds_to_first_output(engine: Engine, request: Request) -> float:
    """Of a request that is alone; it runs to its end afterwards."""
    start = time.perf_counter()
    engine.add(request)
    while not count_outputs(engine.step()):
        pass
    seconds = time.perf_counter() - start
    while engine.scheduler.requests:
        engine.step()
    return seconds


def count_outputs(events: Sequence[Event]) -> int:
    """Raises RuntimeError when a request failed: its figures would be of something else."""
    for event in events:
        if isinstance(event, FailedEvent):
            raise RuntimeError(f"{event.request_id} failed: {event.error}")
    return sum(isinstance(event, OutputEvent) for event in events)
