"""One engine on the real model in this process, for comparing tokens; built once for each set of flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL, NodeFlags, parse
from common.engine.build import EngineParts, build_engine
from common.engine.engine import Engine
from common.engine.events import FailedEvent, OutputEvent
from common.request import Request
from common.sampling_params import SamplingParams


class Generator:
    """Runs requests through an engine step by step and collects their tokens."""

    def __init__(self, engine: Engine, eos_token_ids: frozenset[int]) -> None:
        self.engine = engine
        self._eos = eos_token_ids
        self._number = 0

    def generate(self, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
        """All prompts in one batch, as far as the engine's limits let them; outputs by name."""
        outputs: dict[str, list[int]] = {name: [] for name in prompts}
        names = {self._add(prompt, params): name for name, prompt in prompts.items()}
        unfinished = set(names)
        while unfinished:
            for event in self.engine.step():
                assert not isinstance(event, FailedEvent), event.error
                if isinstance(event, OutputEvent):
                    outputs[names[event.request_id]].append(event.token_id)
                    if event.finish_reason is not None:
                        unfinished.discard(event.request_id)
        self.engine.scheduler.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        return outputs

    def _add(self, prompt: list[int], params: dict[str, Any]) -> str:
        self._number += 1
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **params})
        request = Request(
            f"r{self._number}",
            prompt,
            sampling,
            stop_token_ids=frozenset() if sampling.ignore_eos else self._eos,
            max_num_tokens=len(prompt) + (sampling.max_tokens or 10**6),
        )
        self.engine.add(request)
        return request.request_id


@lru_cache(maxsize=1)
def model_dir() -> Path:
    return resolve_model(DEFAULT_MODEL)


def build(*flags: str) -> EngineParts:
    return build_engine(model_dir(), parse(NodeFlags, ["--num-threads", "1", *flags]), with_head=True)


@pytest.fixture
def generator() -> Callable[..., Generator]:
    """Makes a generator over a new engine with these flags."""

    def make(*flags: str) -> Generator:
        parts = build(*flags)
        return Generator(parts.engine, parts.model_config.eos_token_ids)

    return make
