"""Keywords of `LLM` and `AsyncLLM`: the server's flags, for an engine that has the machine to itself.

Programs written for vLLM name more of them. One whose value asks for nothing but what happens here anyway is taken;
any other value of it is refused, so that nobody believes to have it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from common.argument_parser import did_you_mean
from common.config import Count, EngineFlags, Share
from common.config_variables import warn_of_unknown_variables
from common.cpu_limits import usable_cores
from common.errors import ConfigError


class OfflineFlags(EngineFlags):
    """Throughput counts, not how long a stream waits: larger steps, all cores, more of the memory."""

    cpu_memory_utilization: Share = Field(0.5, description="share of this machine's memory for weights and KV blocks")
    max_num_batched_tokens: Count = Field(512, ge=1, description="token budget of a step")
    chat_template: str | None = Field(None, min_length=1, description="file or template instead of the model's own")
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="whether default sampling parameters come from the model's generation_config.json"
    )
    seed: int = Field(
        0, ge=-(2**63), lt=2**63, description="what seeds are drawn from for prompts whose parameters have none"
    )

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or usable_cores()


_WITHOUT_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "distributed_executor_backend": (),
    "enable_expert_parallel": (False,),
    "disable_custom_all_reduce": (True, False),
    "device": ("auto", "cpu"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "trust_remote_code": (False,),
    "revision": (),
    "code_revision": (),
    "tokenizer_revision": (),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "download_dir": (),
    "hf_token": (False,),
    "hf_overrides": ({},),
    "load_format": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enforce_eager": (True, False),  # steps are always run so
    "compilation_config": (0, {}),
    "cpu_offload_gb": (0,),
    "async_scheduling": (False,),
    "speculative_config": (),
    "enable_lora": (False,),
    "limit_mm_per_prompt": ({},),
    "mm_processor_kwargs": ({},),
    "allowed_local_media_path": ("",),
    "disable_log_stats": (True,),
}
"""By keyword of vLLM's that is none of ours, the values that change nothing here; None is one of each."""


def make_flags(model: str | os.PathLike[str], keywords: dict[str, Any]) -> OfflineFlags:
    """None stands for the default, a path for its text. Raises ConfigError naming the keyword, its value and what is
    allowed."""
    name_of_model: Any = _as_text(model)
    texts = {name: _as_text(value) for name, value in keywords.items()}
    given = {name: value for name, value in texts.items() if _counts(name, value, name_of_model)}
    warn_of_unknown_variables(OfflineFlags)
    try:
        return OfflineFlags(model=name_of_model, **given)
    except ValidationError as error:
        detail = error.errors()[0]
        name = str(detail["loc"][0]) if detail["loc"] else "LLM"
        text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
        raise ConfigError(f"{name} is {detail['input']!r}: {text[:1].lower()}{text[1:]}") from None


def _counts(name: str, value: object, model: str) -> bool:
    """Whether this keyword is for the flags; otherwise its value is one that changes nothing, or ConfigError."""
    if name in OfflineFlags.model_fields:
        return value is not None
    if name == "tokenizer":
        without_effect: tuple[object, ...] = (model,)
    elif name in _WITHOUT_EFFECT:
        without_effect = _WITHOUT_EFFECT[name]
    else:
        known = [*OfflineFlags.model_fields, "tokenizer", *_WITHOUT_EFFECT]
        raise ConfigError(f"LLM has no keyword {name!r}{did_you_mean(name, known)}")
    if value is not None and not any(_is_same(value, one) for one in without_effect):
        advice = f"only {' or '.join(map(repr, without_effect))} is" if without_effect else "leave it out"
        raise ConfigError(f"{name} is {value!r}, which is not supported; {advice}")
    return False


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_same(value: object, other: object) -> bool:
    """True is no 1 here."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other
