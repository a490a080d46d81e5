"""Requests of /v1/completions and /v1/chat/completions: what is understood, what is refused, and why.

An explicit null means the default. A field that this server does not know, or knows and cannot honour yet, is refused
by name unless it has the value that changes nothing; nothing is ignored in silence. Knows no tokenizer: ids are checked
against the vocabulary by whoever has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from common.errors import InvalidRequestError
from common.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from proxy.choice_schema import MAX_SEQUENCES, ChoiceFields
from proxy.strict_model import StrictModel

MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_LENGTH = 512
MAX_BAD_WORDS = 128  # each becomes up to two sequences of token ids
MAX_BAD_WORD_LENGTH = 128
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
DEFAULT_COMPLETION_TOKENS = 16

_TOKEN_ID = re.compile(r"-?(0|[1-9]\d{0,9})", re.ASCII)  # written in one way only: no two keys are the same id

_HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that say something about the caller and nothing about the answer."""

_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "spaces_between_special_tokens": (True, False),  # no tokenizer that is supported puts any there
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Known fields that cannot be honoured yet, with the values that ask for nothing."""


def _refuse_non_text(part: object) -> object:
    if isinstance(part, dict) and part.get("type") != "text":
        raise ValueError(f"content part of type {part.get('type')!r} is not supported, this model reads text only")
    return part


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Annotated[TextPart, BeforeValidator(_refuse_non_text)]], Field(max_length=1024)] = ""
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, content: object) -> object:
        """Tells a wrong part by itself, not as one of several types that content might have been."""
        if isinstance(content, list):
            return [TextPart.model_validate(_refuse_non_text(part)) for part in content]
        if not isinstance(content, str):
            raise ValueError("must be a string or a list of text parts")
        return content

    def for_template(self) -> dict[str, str]:
        """What templates expect: text parts joined by line breaks to one string."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        return message | ({"name": self.name} if self.name else {})


class StreamOptions(StrictModel):
    include_usage: bool = False


class GenerationBody(ChoiceFields):
    """Fields that both endpoints have. Ranges are SamplingParams' own, so that there is one place for them."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_unknown(self.model_extra or {})
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream true")
        if self.use_beam_search:
            self._check_beams_alone()
        return self

    def _check_beams_alone(self) -> None:
        """By the names that clients know; what else filters, SamplingParams refuses by a name that is the same."""
        asked = [name for name, value in (("stop", self.stops), ("bad_words", self.bad_words)) if value]
        if self.structured_output is not None:
            asked.append(self.structured_output.field)
        if asked:
            raise ValueError(f"{asked[0]} cannot be had with use_beam_search true, leave one of them out")

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: object) -> object:
        if not isinstance(stop, str | list):
            raise ValueError("must be a string or a list of strings")
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for item in stops:
            if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_LENGTH:
                raise ValueError(f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, logit_bias: object) -> object:
        """JSON has strings for keys."""
        if not isinstance(logit_bias, dict):
            raise ValueError("must be an object of token ids and numbers")
        if wrong := [key for key in logit_bias if not _TOKEN_ID.fullmatch(key)]:
            raise ValueError(f"has the key {wrong[0][:32]!r}, must have token ids as keys")
        if any(type(bias) not in (int, float) for bias in logit_bias.values()):
            raise ValueError("has a value that is no number")
        return {int(key): bias for key, bias in logit_bias.items()}

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _check_allowed_token_ids(cls, token_ids: object) -> object:
        if not _is_token_ids(token_ids):
            raise ValueError("must be a list of token ids, and not empty")
        return token_ids

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, words: list[str]) -> list[str]:
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(f"has {len(words)} words, at most {MAX_BAD_WORDS} are allowed")
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise ValueError(f"has a word of {len(word)} characters, must be from 1 to {MAX_BAD_WORD_LENGTH}")
        return words

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens the client asked for; None: as many as fit."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """None for none, otherwise how many of the most likely tokens go with each token."""
        raise NotImplementedError

    @property
    def _num_generated_logprobs(self) -> int | None:
        """The best of several are found by their log-probabilities."""
        return 0 if self.num_logprobs is None and self.num_generated > self.n else self.num_logprobs

    @property
    def token_id_fields(self) -> dict[str, list[int]]:
        """What must be of the vocabulary, by field."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or [],
        }

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """The same request with these values for the fields that it leaves out (or has as null).

        Beams are ranked by the model's own probabilities, which nothing changes.
        """
        if self.use_beam_search:
            return self
        missing = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if missing else self

    def sampling_params(
        self, *, max_tokens: int, seed: int, bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    ) -> SamplingParams:
        """Raises InvalidRequestError naming the field, its value and the range."""
        try:
            return SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                seed=seed,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                bad_words_token_ids=bad_words_token_ids,
                structured_output=self.structured_output,
                logprobs=self._num_generated_logprobs,
                prompt_logprobs=self.prompt_logprobs,
                beam_search=self.beam_search,
            )
        except ValueError as error:
            raise InvalidRequestError(str(error), param=str(error).split(" ", 1)[0]) from None

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, seed: int | None) -> int | None:
        if seed is not None and not -(2**63) <= seed <= MAX_SEED:
            raise ValueError(f"is {seed}, must be from {-(2**63)} to {MAX_SEED}")
        return seed

    @field_validator("max_tokens", "max_completion_tokens", check_fields=False)
    @classmethod
    def _check_max_tokens(cls, value: int | None) -> int | None:
        if value is not None and not 1 <= value < 2**31:
            raise ValueError(f"is {value}, must be at least 1")
        return value


class CompletionBody(GenerationBody):
    """prompts: every prompt has choices of its own. logprobs: how many of the most likely tokens, 0 to 20."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: object) -> list[str] | list[list[int]]:
        return _as_prompts(prompt)

    @model_validator(mode="after")
    def _check_sequences(self) -> Self:
        if (total := len(self.prompts) * self.num_sequences) > MAX_SEQUENCES:
            raise ValueError(
                f"{self.sequences_field} is {self.num_sequences}, which makes {total} sequences of "
                f"{len(self.prompts)} prompts, at most {MAX_SEQUENCES} are allowed in one request"
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompts: list[str] | list[list[int]] = self.prompt
        return prompts

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    """max_completion_tokens wins over max_tokens, its older name."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(StrictModel):
    """A prompt, or messages that the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self


class DetokenizeBody(StrictModel):
    model: str | None = None
    tokens: list[int]


# --- from bytes to a body -------------------------------------------------------------------------------------------

_B = TypeVar("_B", bound=BaseModel)


def parse_body(kind: type[_B], body: bytes) -> _B:
    """Raises InvalidRequestError naming the field that is wrong; its message quotes no prompt."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid_request(error.errors(include_url=False, include_input=False)) from None


def _as_invalid_request(details: Iterable[ErrorDetails]) -> InvalidRequestError:
    detail = next(iter(details))
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "json_invalid":
        return InvalidRequestError(f"the request body is not valid JSON: {text.removeprefix('Invalid JSON: ')}")
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return InvalidRequestError(f"the field {field} is required", param=field)
    if not field:  # said of the whole body, the field is named first
        return InvalidRequestError(text, param=text.split(" ", 1)[0] if text[0].islower() else None)
    return InvalidRequestError(f"{field}: {text[:1].lower()}{text[1:]}", param=field)


def _refuse_unknown(extra: dict[str, Any]) -> None:
    asks_no_tool = extra.get("tool_choice") == "none"
    for name, value in extra.items():
        if name in _HARMLESS or (name in ("tools", "functions") and asks_no_tool):
            continue
        if name not in _NEUTRAL_VALUES:
            raise ValueError(f"{name} is not a field that this server knows")
        if value not in (neutral := _NEUTRAL_VALUES[name]):
            allowed = " or ".join(["absent", "null", *map(repr, neutral)])
            raise ValueError(f"{name} is not supported by this server, it may only be {allowed}")


def _as_prompts(prompt: object) -> list[str] | list[list[int]]:
    """One string or list of token ids, or a list of either, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("must be a string, a list of token ids, or a list of either, and not empty")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(f"has {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompt) or all(_is_token_ids(item) for item in prompt):
        return prompt
    raise ValueError("must be a string, a list of token ids, or a list of either")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
