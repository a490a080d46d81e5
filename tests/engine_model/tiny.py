"""What the tests ask of the tiny random model, and what they do to it on the way. Asserts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.runner.logits import pack_bits

PROMPT = [(i * 37 + 11) % 199 for i in range(43)]
STRANGER = [(i * 53 + 7) % 199 for i in range(12)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "top_k": 60, "seed": 5},
    "everything": {
        "temperature": 1.1,
        "min_p": 0.01,
        "seed": 6,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 3.0, 9: -50.0},
        "min_tokens": 10,
        "bad_words_token_ids": ((11,), (7, 12)),
        "allowed_token_ids": tuple(range(3, 190)),
    },
}


class Shortage:
    """No block is free for one request; so somebody behind it is preempted, by the scheduler's own rules.

    sufferer: that request, until enough have been preempted; num_victims: how many that are, the youngest ones.
    """

    def __init__(self, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sufferer: str | None = None
        self.num_victims = 1
        self._num_found = 0
        self._prepare, self._missing = cache.prepare_write, cache.num_missing_blocks
        self._cache = cache
        monkeypatch.setattr(cache, "prepare_write", self.prepare_write)
        monkeypatch.setattr(cache, "num_missing_blocks", self.num_missing_blocks)

    def prepare_write(self, request_id: str, start: int, end: int) -> Any:
        return None if request_id == self.sufferer else self._prepare(request_id, start, end)

    def num_missing_blocks(self, writes: list[tuple[str, int, int]]) -> int:
        if all(request_id != self.sufferer for request_id, _, _ in writes):
            return int(self._missing(writes))
        self._num_found += 1
        if self._num_found >= self.num_victims:
            self.sufferer, self._num_found = None, 0
        return int(self._cache.num_free_blocks) + 1


class SumGrammar:
    """After any outputs a third of the tokens may follow; which third is their sum's matter, so each answer has a mask
    of its own."""

    def __init__(self, vocab_size: int) -> None:
        self._masks = [pack_bits(np.arange(third, vocab_size, 3), vocab_size) for third in range(3)]

    def matcher(self) -> SumGrammar:
        return self

    def mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        return self._masks[sum(output_token_ids) % 3]
