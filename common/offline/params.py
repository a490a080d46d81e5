"""Sampling parameters as a Python program gives them: vLLM's names and defaults, texts included.

`to_engine` makes of them what an engine takes, which knows token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from common.errors import InvalidRequestError
from common.sampling_params import BeamSearchParams
from common.sampling_params import SamplingParams as EngineParams
from common.structured_output import Kind, StructuredOutput
from common.text.bad_words import encode_bad_words
from common.text.tokenizer import TextTokenizer

MAX_N = 256
MAX_STOPS = 16
MAX_STOP_LENGTH = 512

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
_BEAM_FIELDS = ("length_penalty", "early_stopping", "beam_width")


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
        kinds: dict[str, Kind] = {
            "json": "json_schema",
            "regex": "regex",
            "choice": "choice",
            "grammar": "grammar",
            "json_object": "json_object",
        }
        given = {name: value for name in kinds if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            raise ValueError(f"structured_outputs has {len(given)} of {', '.join(kinds)}, must have one")
        [(name, value)] = given.items()
        if name == "json_object":
            return StructuredOutput("json_object", field="structured_outputs.json_object")
        text = value if isinstance(value, str) and name != "choice" else json.dumps(value, ensure_ascii=False)
        return StructuredOutput(kinds[name], text, f"structured_outputs.{name}")


@dataclass(kw_only=True)
class SamplingParams:
    """How answers are drawn. Fields mean what docs/sampling.md says; these are about texts and several answers:

    n, best_of: answers to each prompt; best_of are made and the n most likely returned.
    stop: texts that end an answer and are no part of it, unless include_stop_str_in_output.
    bad_words: texts that do not occur in it. seed: None draws one from the LLM's own seed.
    logprobs, prompt_logprobs: how many of the most likely tokens go with each token; None for none.
    use_beam_search: the n best of beam_width (best_of or n, if not given) beams instead of samples.
    detokenize: False leaves the text empty.

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
        """seed: what to draw with if it has none. Raises InvalidRequestError naming the field."""
        try:
            self._check_answers()
            values = {name: getattr(self, name) for name in _SAME_NAME}
            values |= {
                "seed": seed if self.seed is None else self.seed,
                "stop_token_ids": list(self.stop_token_ids or ()),
                "logit_bias": dict(self.logit_bias or {}),
                "allowed_token_ids": None if self.allowed_token_ids is None else list(self.allowed_token_ids),
                "bad_words_token_ids": encode_bad_words(self.bad_words or (), tokenizer),
                "structured_output": self._structured_output(),
                "beam_search": self._beam_search(),
            }
            if self.best_of is not None and self.best_of > self.n and self.logprobs is None:
                values["logprobs"] = 0  # the best are found by them
            params = _convert(values)
            params.check_vocabulary(vocab_size)
        except ValueError as error:
            raise InvalidRequestError(str(error), param=str(error).split(" ", 1)[0]) from None
        return params

    def _check_answers(self) -> None:
        for name in ("n", "best_of"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not 1 <= count <= MAX_N):
                raise ValueError(f"{name} is {count!r}, must be from 1 to {MAX_N}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, must be at least n ({self.n})")
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stops)} texts, at most {MAX_STOPS} are allowed")
        if wrong := [stop for stop in self.stops if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH]:
            raise ValueError(f"stop has {wrong[0]!r:.80}, must hold texts of 1 to {MAX_STOP_LENGTH} characters")
        if self.stops and not self.detokenize:
            raise ValueError("stop is given, must be empty with detokenize false")

    def _structured_output(self) -> StructuredOutput | None:
        return None if self.structured_outputs is None else self.structured_outputs.to_engine()

    def _beam_search(self) -> BeamSearchParams | None:
        if not self.use_beam_search:
            defaults = {one.name: one.default for one in fields(self)}
            if wrong := [name for name in _BEAM_FIELDS if getattr(self, name) != defaults[name]]:
                raise ValueError(f"{wrong[0]} is {getattr(self, wrong[0])!r}, which needs use_beam_search true")
            return None
        width = self.beam_width or self.best_of or self.n
        if width < self.n:
            raise ValueError(f"beam_width is {width}, must be at least n ({self.n})")
        if self.stops:
            raise ValueError("stop is given, must be empty with use_beam_search true")
        return BeamSearchParams(width=width, length_penalty=self.length_penalty, early_stopping=self.early_stopping)


def _convert(values: dict[str, Any]) -> EngineParams:
    """Types are checked as those of a message are. Raises ValueError naming the field."""
    structs = {name: values.pop(name) for name in ("structured_output", "beam_search")}
    try:
        params = msgspec.convert(values, EngineParams)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"{place.rstrip('`')}: {text[:1].lower()}{text[1:]}" if place else text) from None
    return msgspec.structs.replace(params, **structs)
