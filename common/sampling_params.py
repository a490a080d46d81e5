"""How to draw the tokens of one request. A value object: validated when made, also when it arrives by wire."""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; every field has the meaning and the default that vLLM and the OpenAI API give it.

    temperature: 0 is greedy. Logits (float32) are divided by it after their maximum was subtracted.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
    min_p: keep tokens at least min_p times as likely as the most likely one.
    The filters act in the order temperature, top_k, top_p, min_p; the most likely token always survives.
    max_tokens: most tokens to generate; None means as many as the context holds.
    seed: with the output index, the only source of randomness (`sampler.py`). The proxy draws one if none came.
    stop_token_ids: generation ends after any of these, beside the model's own end tokens.
    ignore_eos: do not end at the model's end tokens.
    logprobs: None for none, k for the sampled token's log-probability and the k most likely ones (k may be 0).

    Raises ValueError (msgspec.ValidationError on decoding) naming the field, its value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 1e4)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), MAX_SEED)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, 2**32 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} is {value}, must be from {low} to {high}")
