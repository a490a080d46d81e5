"""When a request has had its last output. Pure; knows token ids and limits, no text (stop strings are the proxy's)."""

from __future__ import annotations

from common.request import FinishReason, Request


def apply_stop_rules(request: Request, max_num_tokens: int) -> FinishReason | None:
    """Whether the output just appended was the last one; sets `stop_reason` when a token of the user's ended it.

    request.stop_token_ids: every id that ends this request, the model's end tokens included unless they are to be
        ignored. As in vLLM, `stop_reason` stays None for the model's own end tokens.
    max_num_tokens: most tokens that context and pool allow; the last one needs no slot, it is never computed.
    """
    assert request.params is not None
    token_id = request.output_token_ids[-1]
    if token_id in request.params.stop_token_ids:
        request.stop_reason = token_id
        return FinishReason.STOP
    if token_id in request.stop_token_ids:
        return FinishReason.STOP
    max_tokens = request.params.max_tokens
    if max_tokens is not None and len(request.output_token_ids) >= max_tokens:
        return FinishReason.LENGTH
    if request.num_tokens >= min(max_num_tokens, request.max_num_tokens):
        return FinishReason.LENGTH
    return None
