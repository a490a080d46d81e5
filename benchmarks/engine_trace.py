"""Requests of a real service, scaled to this model's context: lengths and shared prefixes, no text.

The trace (benchmarks/data/README.md) was recorded with contexts of 131,072 tokens. Every length is divided by 16, the
512 tokens of one hash id too, so shapes and shares stay as they were. Knows no engine.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

TRACE_FILE = Path(__file__).resolve().parent / "data" / "mooncake_conversation_2000.jsonl.gz"
SCALE = 16
TOKENS_PER_HASH = 512 // SCALE
MAX_MODEL_LEN = 131_072 // SCALE


@dataclass(frozen=True)
class TraceRequest:
    """hash_ids: equal ones at the start of two prompts stand for an equal prefix of TOKENS_PER_HASH tokens each."""

    num_in: int
    num_out: int
    hash_ids: tuple[int, ...]

    def prompt_token_ids(self) -> list[int]:
        """Token ids that are equal exactly where the trace says so; above any vocabulary, for books without a model."""
        tokens = [h * TOKENS_PER_HASH + i for h in self.hash_ids for i in range(TOKENS_PER_HASH)]
        return tokens[: self.num_in]


def load_trace(num_requests: int) -> list[TraceRequest]:
    """The first requests, in order of arrival."""
    with gzip.open(TRACE_FILE, "rt") as lines:
        return [_scaled(*json.loads(line)) for _, line in zip(range(num_requests), lines, strict=False)]


def share_repeated(requests: list[TraceRequest]) -> float:
    """Share of prompt tokens that an endless prefix cache would have had: the bound of any hit rate."""
    seen: set[int] = set()
    num_tokens = num_repeated = 0
    for request in requests:
        for index, hash_id in enumerate(request.hash_ids):
            count = min(TOKENS_PER_HASH, request.num_in - index * TOKENS_PER_HASH)
            num_tokens += count
            num_repeated += count if hash_id in seen else 0
            seen.add(hash_id)
    return num_repeated / num_tokens


def _scaled(num_in: int, num_out: int, hash_ids: list[int]) -> TraceRequest:
    return TraceRequest(-(-num_in // SCALE), max(1, -(-num_out // SCALE)), tuple(hash_ids))
