"""Engines in this process, for comparing tokens: on the real model, and on a tiny random one for large grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL, NodeFlags, parse
from common.engine.build import EngineParts, build_engine
from common.engine.engine import Engine
from common.engine.events import Event, FailedEvent, OutputEvent
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
        names = {self.add(prompt, **params).request_id: name for name, prompt in prompts.items()}
        unfinished = set(names)
        while unfinished:
            for event in self.engine.step():
                assert not isinstance(event, FailedEvent), event.error
                if isinstance(event, OutputEvent):
                    outputs[names[event.request_id]].append(event.token_id)
                    if event.finish_reason is not None:
                        unfinished.discard(event.request_id)
        self.assert_nothing_held()
        return outputs

    def assert_nothing_held(self) -> None:
        self.engine.scheduler.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks

    def add(self, prompt: list[int], *, fields: dict[str, Any] | None = None, **params: Any) -> Request:
        """params: of the sampling; fields: of the request."""
        self._number += 1
        request = self._make(f"r{self._number}", prompt, params, fields or {})
        self.engine.add(request)
        return request

    def add_choices(self, prompt: list[int], numbers: Sequence[int], **params: Any) -> Request:
        """One request for the answers of these numbers."""
        name = f"r{self._number + 1}"
        choices = [self._make(f"{name}/{number}", prompt, params, {"choice": number}) for number in numbers]
        return self.add(prompt, fields={"choices": choices}, **params)

    def finish(self, *requests: Request) -> list[Event]:
        """Runs until all of them have ended; what was told meanwhile."""
        events: list[Event] = []
        while not all(request.is_finished for request in requests):
            events += self.step()
        return events

    def step(self) -> list[Event]:
        """One step, after which the books fit and nothing has failed."""
        events = self.engine.step()
        self.engine.scheduler.check_integrity()
        assert not [event.error for event in events if isinstance(event, FailedEvent)]
        return events

    def _make(self, request_id: str, prompt: list[int], params: dict[str, Any], fields: dict[str, Any]) -> Request:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **params})
        return Request(
            request_id,
            prompt,
            sampling,
            stop_token_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
            max_num_tokens=len(prompt) + (sampling.max_tokens or 10**6),
            **fields,
        )


@lru_cache(maxsize=1)
def real_model_dir() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose next token depends on all tokens before it; milliseconds a step."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=199)


def make_tiny_model(directory: Path, vocab_size: int) -> Path:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@lru_cache(maxsize=2)
def transformers_model(model_dir: Path) -> Any:
    model: Any = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()


def build(model_dir: Path, *flags: str) -> EngineParts:
    return build_engine(model_dir, parse(NodeFlags, ["--num-threads", "1", *flags]), with_head=True)


@pytest.fixture
def generator() -> Callable[..., Generator]:
    """Makes a generator over a new engine on the real model with these flags."""

    def make(*flags: str) -> Generator:
        parts = build(real_model_dir(), *flags)
        return Generator(parts.engine, parts.model_config.eos_token_ids)

    return make


@pytest.fixture
def tiny_generator(tiny_model_dir: Path) -> Callable[..., Generator]:
    """The same on the tiny model, with a pool of 100 blocks unless a flag says otherwise."""

    def make(*flags: str) -> Generator:
        parts = build(tiny_model_dir, "--num-gpu-blocks-override", "100", *flags)
        return Generator(parts.engine, parts.model_config.eos_token_ids)

    return make
