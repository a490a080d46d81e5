"""The model as the proxy knows it: names, tokenizer, chat template, end tokens, limits, sampling defaults. No torch.

Tokenizing runs on threads of its own, so that a long prompt does not hold up the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.checkpoints.sampling_defaults import SamplingDefaults, load_sampling_defaults
from common.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from common.text.chat_template import ChatTemplate, load_chat_template
from common.text.tokenizer import TextTokenizer

_T = TypeVar("_T")
_NUM_THREADS = 2
_MAX_TOKENIZING = 1024
_MAX_SHOWN_CHARACTERS = 256  # of what a client sent, in an error message


@dataclass(frozen=True)
class ModelLimits:
    """vocab_size: width of the output layer, which may be wider than the tokenizer."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class ServingModel:
    """max_model_len: asked for at each request, since the nodes decide it (None: no node is here yet)."""

    def __init__(
        self,
        name: str,
        tokenizer: TextTokenizer,
        chat_template: ChatTemplate | None,
        limits: ModelLimits,
        max_model_len: Callable[[], int | None] = lambda: None,
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self._chat_template = chat_template
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._num_tokenizing = 0

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._max_model_len() or self.limits.max_model_len

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError for any other model. No name at all means the model that is here."""
        if name is not None and name != self.name:
            shown = name[:_MAX_SHOWN_CHARACTERS]
            text = f"the model {shown!r} does not exist; this server has {self.name!r}"
            raise ModelNotFoundError(text, param="model")

    def render_chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                f"the model {self.name!r} has no chat template; use /v1/completions, or start with --chat-template"
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a prompt; one that is certainly too long is refused before any work.

        Raises ContextLengthError, InvalidRequestError (an empty prompt), OverloadedError (too many at once).
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{param} holds a lone surrogate, which is no character", param=param) from None
        self.check_prompt_length(num_bytes // self.tokenizer.max_token_bytes, param, is_estimate=True)
        token_ids = await self._in_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if not token_ids:
            raise InvalidRequestError(f"{param} is empty, must have at least one token", param=param)
        return token_ids

    def check_prompt_length(self, num_tokens: int, param: str, *, is_estimate: bool = False) -> None:
        if num_tokens >= self.max_model_len:
            at_least = "at least " if is_estimate else ""
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{at_least}{num_tokens} tokens, which leaves no room for an answer. Please shorten the prompt.",
                param=param,
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequestError for an id that the model does not have."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.limits.vocab_size:
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequestError(
                f"{param} has token id {worst}, must be from 0 to {self.limits.vocab_size - 1}", param=param
            )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        if self._num_tokenizing >= _MAX_TOKENIZING:
            raise OverloadedError(f"{self._num_tokenizing} prompts wait to be tokenized, no more fit")
        self._num_tokenizing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._num_tokenizing -= 1


def load_serving_model(
    directory: Path,
    name: str,
    limits: ModelLimits,
    max_model_len: Callable[[], int | None],
    chat_template: str | None = None,
    *,
    uses_generation_config: bool = True,
) -> ServingModel:
    """Reads tokenizer, chat template and sampling defaults of a directory; raises CheckpointError or ConfigError.

    chat_template: a file or a template that replaces the model's own.
    """
    tokenizer = TextTokenizer.from_directory(directory)
    template = load_chat_template(directory, tokenizer.special_tokens, chat_template)
    defaults = load_sampling_defaults(directory) if uses_generation_config else SamplingDefaults()
    return ServingModel(name, tokenizer, template, limits, max_model_len, defaults)
