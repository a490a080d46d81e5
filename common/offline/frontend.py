"""Between Python programs and an engine: prompts and parameters in, engine requests and texts out. Runs no step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoints.sampling_defaults import SamplingDefaults, load_sampling_defaults
from common.engine.build import EngineParts
from common.engine.new_request import AnswerLimits, new_prompt
from common.errors import InvalidRequestError
from common.grammar.compiler import GrammarCompiler
from common.offline.answers import PromptAnswers
from common.offline.flags import OfflineFlags
from common.offline.params import SamplingParams, checked_params
from common.offline.prompts import Message, Prompt, for_template, text_or_ids
from common.text.chat_template import load_chat_template
from common.text.tokenizer import TextTokenizer


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
        return self._chat_template.render(for_template(messages), add_generation_prompt=add_generation_prompt)

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, is_chat: bool = False
    ) -> PromptAnswers:
        """Raises InvalidRequestError (or its ContextLengthError) for what can never run."""
        text, token_ids = self._encode(prompt, is_chat=is_chat)
        params = checked_params(params)  # a copy: what the caller does to theirs meanwhile changes nothing
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

    def _encode(self, prompt: Prompt, *, is_chat: bool) -> tuple[str | None, list[int]]:
        found = text_or_ids(prompt)
        if isinstance(found, str):
            return found, self._encode_text(found, is_chat=is_chat)
        worst = min(found) if min(found) < 0 else max(found)
        if not 0 <= worst < self.limits.vocab_size:
            last = self.limits.vocab_size - 1
            raise InvalidRequestError(f"the prompt has token id {worst}, must be from 0 to {last}", param="prompt")
        return None, found

    def _encode_text(self, text: str, *, is_chat: bool) -> list[int]:
        param = "messages" if is_chat else "prompt"
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{param} holds a lone surrogate, which is no character", param=param) from None
        token_ids = self.tokenizer.encode(text, add_special_tokens=not is_chat)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty, must have at least one token", param=param)
        return token_ids
