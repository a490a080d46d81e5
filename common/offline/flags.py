"""Keywords of `LLM` and `AsyncLLM`: the server's flags, for an engine that has the machine to itself."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import Field, ValidationError

from common.config import EngineFlags, Share
from common.errors import ConfigError


class OfflineFlags(EngineFlags):
    """Throughput counts, not how long a stream waits: larger steps, all cores, more of the memory."""

    cpu_memory_utilization: Share = Field(0.5, description="share of this machine's memory for weights and KV blocks")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of a step")
    chat_template: str | None = Field(None, min_length=1, description="file or template instead of the model's own")
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="whether default sampling parameters come from the model's generation_config.json"
    )
    seed: int = Field(0, description="what seeds are drawn from for prompts whose parameters have none")

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or len(os.sched_getaffinity(0))


def make_flags(model: str, keywords: dict[str, Any]) -> OfflineFlags:
    """Raises ConfigError naming the keyword, its value and what is allowed."""
    for name in keywords:
        if name not in OfflineFlags.model_fields:
            close = difflib.get_close_matches(name, OfflineFlags.model_fields, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ConfigError(f"LLM has no keyword {name!r}{hint}")
    try:
        return OfflineFlags(model=model, **keywords)
    except ValidationError as error:
        detail = error.errors()[0]
        name = str(detail["loc"][0]) if detail["loc"] else "LLM"
        text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
        raise ConfigError(f"{name} is {detail['input']!r}: {text[:1].lower()}{text[1:]}") from None
