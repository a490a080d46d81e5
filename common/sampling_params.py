"""How to draw the tokens of one request. A value object: validated when made, also when it arrives by wire.

Knows no vocabulary: whoever has one calls `check_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from common.structured_output import StructuredOutput

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 1e3
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e3
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 128
MAX_ALLOWED_TOKEN_IDS = 2**18
_MAX_TOKEN_ID = 2**32 - 1


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search instead of drawing: keeps the `width` most likely beginnings, each longer by a token in every step.

    length_penalty: a beam's score is the sum of its log-probabilities over (its number of outputs) ** length_penalty.
    early_stopping: True ends with `width` finished beams; False when no running beam would be among them if it ended
        now; "never" when none ever can be. The meaning that transformers gives them.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _check_range("beam_width", self.width, 1, MAX_BEAM_WIDTH)
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; every field has the meaning and the default that vLLM and the OpenAI API give it.

    temperature: 0 is greedy. Logits (float32) are divided by it after their maximum was subtracted.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
    min_p: keep tokens at least min_p times as likely as the most likely one.
    max_tokens: most tokens to generate; None means as many as the context holds.
    min_tokens: the request's end tokens (the model's, and stop_token_ids) have no chance before so many outputs exist.
    seed: with the output index, the only source of randomness (`sampler.py`). The proxy draws one if none came.
    stop_token_ids: generation ends after any of these, beside the model's own end tokens.
    ignore_eos: do not end at the model's end tokens.
    presence_penalty: subtracted from the logit of each token that is among the outputs.
    frequency_penalty: the same, times how often the token is among the outputs.
    repetition_penalty: logits of tokens of prompt and outputs are divided by it if positive, multiplied if not.
    logit_bias: added to the logits of these token ids.
    allowed_token_ids: no other token has a chance; None allows all.
    bad_words_token_ids: sequences that the outputs never contain: the last token of each has no chance where the
        outputs (not the prompt) end with the tokens before it.
    structured_output: what the answer must match; a token that no match goes on with has no chance.
    logprobs: None for none, k for the sampled token's log-probability and the k most likely ones (k may be 0).
    prompt_logprobs: the same for the prompt's tokens.
    beam_search: None draws. With it what filters or changes logits must be at its default; temperature says nothing.

    The order in which they act is docs/sampling.md's; the most likely token always survives.
    Raises ValueError (msgspec.ValidationError on decoding) naming the field, its value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_search: BeamSearchParams | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 1e4)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_above_zero("top_p", self.top_p, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self._check_min_tokens()
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), MAX_SEED)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_above_zero("repetition_penalty", self.repetition_penalty, MAX_REPETITION_PENALTY)
        self._check_token_lists()
        if self.ignore_eos and self.structured_output is not None:
            raise ValueError(f"ignore_eos is true, must be false: {self.structured_output.field} ends at an end token")
        if self.beam_search is not None:
            self._check_only_beams()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Asks for more than drawing from the logits as they are."""
        return bool(
            self.penalizes_outputs
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
            or self.bad_words_token_ids
            or self.allowed_token_ids is not None
        )

    @property
    def penalizes_outputs(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError naming the field and the token id that a model with so many tokens does not have."""
        for name, token_ids in self._token_id_fields():
            worst = max(token_ids, default=0)
            if worst >= vocab_size:
                raise ValueError(f"{name} has token id {worst}, must be from 0 to {vocab_size - 1}")

    def _check_only_beams(self) -> None:
        """Beams are ranked by the model's own log-probabilities."""
        for name, neutral in _NEUTRAL_FOR_BEAMS.items():
            if (value := getattr(self, name)) not in neutral:
                shown = "given" if isinstance(value, msgspec.Struct) else value
                raise ValueError(f"{name} is {shown}, must be {neutral[0]} with beam search")

    def _token_id_fields(self) -> list[tuple[str, Iterable[int]]]:
        return [
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            *(("bad_words_token_ids", word) for word in self.bad_words_token_ids),
        ]

    def _check_min_tokens(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, must be from 0 to max_tokens, which is {self.max_tokens}"
            )
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)

    def _check_token_lists(self) -> None:
        _check_count("stop_token_ids", self.stop_token_ids, 0, MAX_STOP_TOKEN_IDS, "ids")
        _check_count("logit_bias", self.logit_bias, 0, MAX_LOGIT_BIAS_IDS, "ids")
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias of token id {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.allowed_token_ids is not None:
            _check_count("allowed_token_ids", self.allowed_token_ids, 1, MAX_ALLOWED_TOKEN_IDS, "ids")
        _check_count("bad_words_token_ids", self.bad_words_token_ids, 0, MAX_BAD_WORDS, "words")
        for word in self.bad_words_token_ids:
            _check_count("bad_words_token_ids", word, 1, MAX_BAD_WORD_TOKENS, "ids in a word")
        for name, token_ids in self._token_id_fields():
            for token_id in token_ids:
                _check_range(name, token_id, 0, _MAX_TOKEN_ID)


_NEUTRAL_FOR_BEAMS: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "allowed_token_ids": (None,),
    "bad_words_token_ids": ((),),
    "structured_output": (None,),
}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} is {value}, must be from {low} to {high}")


def _check_above_zero(name: str, value: float, high: float) -> None:
    if not 0.0 < value <= high:
        raise ValueError(f"{name} is {value}, must be above 0 and at most {high:g}")


def _check_count(name: str, items: dict[int, float] | tuple[object, ...], low: int, high: int, what: str) -> None:
    if not low <= len(items) <= high:
        raise ValueError(f"{name} has {len(items)} {what}, must have from {low} to {high}")
