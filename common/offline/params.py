"""Sampling parameters as a Python program gives them: vLLM's names and defaults, texts included.

`to_engine` makes of them what an engine takes, which knows token ids only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import TypeAdapter, with_config

from common.errors import InvalidRequestError
from common.offline.typed import STRICT, plain, typed
from common.sampling_params import BeamSearchParams
from common.sampling_params import SamplingParams as EngineParams
from common.structured_output import MAX_CHOICES, Kind, StructuredOutput
from common.text.bad_words import encode_bad_words
from common.text.tokenizer import TextTokenizer

# what the proxy allows
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 512
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)
_USER_NAMES = {"bad_words_token_ids": "bad_words"}  # of the fields that have another name in an engine
_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
_TOKEN_ID = re.compile(r"-?(0|[1-9]\d{0,9})", re.ASCII)


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must match: exactly one of them. json: a JSON schema, as a dict or a text."""

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def to_engine(self) -> StructuredOutput:
        """Raises ValueError unless there is one."""
        given = {name: value for name in _KINDS if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            raise ValueError(f"structured_outputs has {len(given) or 'none'} of {', '.join(_KINDS)}, must have one")
        [(name, value)] = given.items()
        field = f"structured_outputs.{name}"
        if name == "choice" and not 1 <= len(value) <= MAX_CHOICES:
            raise ValueError(f"{field} has {len(value)} choices, must have from 1 to {MAX_CHOICES}")
        if name == "json_object":
            return StructuredOutput("json_object", field=field)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{field} cannot be written as JSON: {error}") from None
        return StructuredOutput(_KINDS[name], text, field)


@with_config(STRICT)
@dataclass(kw_only=True)
class SamplingParams:
    """How answers are drawn. Fields mean what docs/sampling.md says; these are about texts and several answers:

    n, best_of: answers to each prompt; best_of are made and the n most likely returned.
    stop: texts that end an answer and are no part of it, unless include_stop_str_in_output.
    bad_words: texts that do not occur in it. seed: None draws one from the LLM's own seed.
    logprobs, prompt_logprobs: how many of the most likely tokens go with each token; None for none.
    use_beam_search: the n best of beam_width (best_of or n, if not given) beams instead of samples.
    detokenize: False leaves the text empty. structured_outputs: also as a dict; logit_bias: ids also as texts.

    Raises nothing when made; `generate` raises InvalidRequestError naming the field, its value and the limit.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_generated(self) -> int:
        """Answers that an engine makes for each prompt."""
        return self.n if self.use_beam_search else self.best_of or self.n

    def to_engine(self, tokenizer: TextTokenizer, *, vocab_size: int, seed: int) -> EngineParams:
        """Of params that `checked_params` gave. seed: what to draw with if there is none.

        Raises InvalidRequestError naming the field.
        """
        try:
            self._check_answers()
            values = {name: getattr(self, name) for name in _SAME_NAME}
            if self.num_generated > self.n and self.logprobs is None:
                values["logprobs"] = 0  # the best are found by them
            params = EngineParams(
                **values,
                seed=seed if self.seed is None else self.seed,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=dict(self.logit_bias or {}),
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                bad_words_token_ids=encode_bad_words(self.bad_words or (), tokenizer),
                structured_output=None if self.structured_outputs is None else self.structured_outputs.to_engine(),
                beam_search=self._beam_search(),
            )
            params.check_vocabulary(vocab_size)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            name = _USER_NAMES.get(name, name)
            raise InvalidRequestError(f"{name} {rest}", param=name) from None
        return params

    def _check_answers(self) -> None:
        for name in ("n", "best_of"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= MAX_N:
                raise ValueError(f"{name} is {count}, must be from 1 to {MAX_N}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, must be at least n ({self.n})")
        _check_texts("stop", self.stops, MAX_STOPS, MAX_STOP_LENGTH)
        _check_texts("bad_words", self.bad_words or (), MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        if self.stops and not self.detokenize:
            raise ValueError("stop is given, must be empty with detokenize false")

    def _beam_search(self) -> BeamSearchParams | None:
        """What only acts with beams is refused without them, and the other way round."""
        if not self.use_beam_search:
            neutral = {"beam_width": (None, self.num_generated), "length_penalty": (1.0,), "early_stopping": (False,)}
            for name, values in neutral.items():
                if (value := getattr(self, name)) not in values:
                    raise ValueError(f"{name} is {value}, which needs use_beam_search true")
            return None
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(self, name):
                raise ValueError(f"{name} cannot be had with use_beam_search true, leave one of them out")
        width = self.beam_width if self.beam_width is not None else self.best_of or self.n
        if width < self.n:
            raise ValueError(f"beam_width is {width}, must be at least n ({self.n})")
        if self.best_of not in (None, width):
            raise ValueError(f"best_of is {self.best_of}, must be absent or beam_width ({width}), its newer name")
        return BeamSearchParams(width=width, length_penalty=self.length_penalty, early_stopping=self.early_stopping)


_SAMPLING_PARAMS = TypeAdapter(SamplingParams)


def checked_params(params: object) -> SamplingParams:
    """A copy whose values have the types of its fields. Raises InvalidRequestError naming the field and its value."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params is {params!r:.80}, must be SamplingParams, or a list with one for each prompt",
            param="sampling_params",
        )
    values = {field.name: plain(getattr(params, field.name)) for field in fields(SamplingParams)}
    values["logit_bias"] = _by_token_id(values["logit_bias"])
    values["structured_outputs"] = _as_structured_outputs(values["structured_outputs"])
    return typed(_SAMPLING_PARAMS, SamplingParams(**values))


def _by_token_id(logit_bias: Any) -> Any:
    """Ids that are written as texts, the habit of JSON, as numbers."""
    if not isinstance(logit_bias, Mapping):
        return logit_bias
    found = {}
    for key, bias in logit_bias.items():
        is_text = isinstance(key, str) and _TOKEN_ID.fullmatch(key) is not None
        found[int(key) if is_text else plain(key)] = plain(bias)
    if len(found) < len(logit_bias):
        raise InvalidRequestError("logit_bias has a token id twice, as number and as text", param="logit_bias")
    return found


def _as_structured_outputs(wanted: Any) -> Any:
    if not isinstance(wanted, Mapping):
        return wanted
    if unknown := [key for key in wanted if key not in _KINDS]:
        text = f"structured_outputs has the key {unknown[0]!r:.80}, must have one of {', '.join(_KINDS)}"
        raise InvalidRequestError(text, param="structured_outputs")
    return StructuredOutputsParams(**wanted)


def _check_texts(name: str, texts: Sequence[str], most: int, longest: int) -> None:
    if len(texts) > most:
        raise ValueError(f"{name} has {len(texts)} texts, at most {most} are allowed")
    for text in texts:
        if not 1 <= len(text) <= longest:
            raise ValueError(f"{name} has {text!r:.80}, must hold texts of 1 to {longest} characters")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{name} holds a lone surrogate, which is no character")
