"""Between Python programs and an engine: prompts and parameters in, engine requests and texts out. Runs no step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.checkpoints.sampling_defaults import SamplingDefaults, load_sampling_defaults
from common.engine.build import EngineParts
from common.engine.new_request import AnswerLimits, new_prompt
from common.errors import InvalidRequestError
from common.grammar.compiler import GrammarCompiler
from common.offline.answers import PromptAnswers
from common.offline.flags import OfflineFlags
from common.offline.params import SamplingParams
from common.text.chat_template import load_chat_template
from common.text.tokenizer import TextTokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of {"prompt": text} and {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]


class Frontend:
    def __init__(self, model_dir: Path, flags: OfflineFlags, parts: EngineParts) -> None:
        config = parts.model_config
        self.tokenizer = TextTokenizer.from_directory(model_dir)
        self.limits = AnswerLimits(parts.max_model_len, config.vocab_size, config.eos_token_ids)
        self._engine = parts.engine
        self._model = flags.public_model_name
        self._chat_template = load_chat_template(model_dir, self.tokenizer.special_tokens, flags.chat_template)
        self._grammars = GrammarCompiler(model_dir, config.vocab_size, config.eos_token_ids)
        self._defaults = SamplingDefaults()
        if flags.generation_config == "auto":
            self._defaults = load_sampling_defaults(model_dir)
        self._seeds = random.Random(flags.seed)
        self._num_prompts = 0

    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json says, otherwise neutral."""
        values: dict[str, Any] = dict(self._defaults.values)
        params = SamplingParams(**values)
        if self._defaults.max_tokens is not None:
            params.max_tokens = self._defaults.max_tokens
        return params

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(f"the model {self._model!r} has no chat template; give chat_template to LLM")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, is_chat: bool = False
    ) -> PromptAnswers:
        """Raises InvalidRequestError (or its ContextLengthError) for what can never run."""
        text, token_ids = self._encode(prompt, add_special_tokens=not is_chat)
        self._num_prompts += 1
        wire = params.to_engine(self.tokenizer, vocab_size=self.limits.vocab_size, seed=self._seeds.getrandbits(63))
        request_id = request_id or str(self._num_prompts - 1)
        numbers = range(params.num_generated)
        request = new_prompt(request_id, token_ids, wire, self.limits, choices=numbers)
        if wire.structured_output is not None:
            grammar = self._grammars.compile(wire.structured_output)
            for one in request.choices or [request]:
                one.grammar = grammar
        self._engine.check_fits(request)
        return PromptAnswers(
            request,
            params,
            self.tokenizer,
            text=text,
            end_token_ids=self.limits.eos_token_ids,
            continues_prompt=not is_chat,
        )

    def _encode(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            prompt = _only_value(prompt)
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if not token_ids:
                raise InvalidRequestError("the prompt is empty, must have at least one token")
            return prompt, token_ids
        token_ids = list(prompt)
        if not token_ids or any(type(token_id) is not int for token_id in token_ids):
            raise InvalidRequestError("the prompt must be a text or a list of token ids, and not empty")
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        if not 0 <= worst < self.limits.vocab_size:
            last = self.limits.vocab_size - 1
            raise InvalidRequestError(f"the prompt has token id {worst}, must be from 0 to {last}")
        return None, token_ids


def _only_value(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    known = {"prompt", "prompt_token_ids"}
    if len(prompt) != 1 or not known.issuperset(prompt):
        raise InvalidRequestError(f"a prompt has the keys {sorted(prompt)}, must have one of prompt, prompt_token_ids")
    [value] = prompt.values()
    if not isinstance(value, str | Sequence):
        raise InvalidRequestError(f"the prompt is a {type(value).__name__}, must be a text or a list of token ids")
    return value


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list."""
    items: list[Any] = list(messages)
    if items and isinstance(items[0], Mapping):
        return [items]
    return items
