"""What an engine is given for a prompt and its answers: one request, which forks if there are several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from common.request import Request
from common.sampling_params import SamplingParams


@dataclass(frozen=True)
class AnswerLimits:
    """What a model and its engine allow an answer. max_model_len: tokens of prompt and answer together."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def new_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: AnswerLimits,
    *,
    choice: int = 0,
    output_token_ids: Iterable[int] = (),
) -> Request:
    """One answer, or a beam search. output_token_ids: what it had before it came here."""
    outputs = list(output_token_ids)
    if outputs:  # they came after the prompt's log-probabilities
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    longest = limits.max_model_len
    if params.max_tokens is not None:
        longest = min(longest, len(prompt_token_ids) + params.max_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=params,
        output_token_ids=outputs,
        stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_token_ids),
        max_num_tokens=longest,
        choice=choice,
    )


def new_prompt(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: AnswerLimits,
    *,
    choices: Sequence[int],
) -> Request:
    """A prompt and its answers; those have ids of their own, `request_id/choice`, if there are several.

    choices: their numbers. Beams come of the prompt itself, whatever their number.
    """
    if params.beam_search is not None or len(choices) == 1:
        return new_request(request_id, prompt_token_ids, params, limits, choice=choices[0])
    prompt = new_request(request_id, prompt_token_ids, params, limits)
    prompt.choices = [
        new_request(f"{request_id}/{choice}", prompt_token_ids, params, limits, choice=choice) for choice in choices
    ]
    return prompt
