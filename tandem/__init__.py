"""Tandem: the public face. What `from tandem import ...` finds is loaded when it is asked for: `tandem --help` needs no
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from common.installation import missing_engine_text

if TYPE_CHECKING:
    from common.offline.async_llm import AsyncLLM
    from common.offline.llm import LLM
    from common.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from common.offline.params import SamplingParams, StructuredOutputsParams

_PLACES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "params",
    "StructuredOutputsParams": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("LLM", "AsyncLLM") and (text := missing_engine_text()) is not None:
        raise ImportError(text)
    return getattr(import_module(f"common.offline.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
