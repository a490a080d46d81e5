"""Which of several answers the model holds for the most likely."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.text.answer import AnswerToken

_LEAST_LOGPROB = -9999.0


def mean_logprob(tokens: Sequence[AnswerToken]) -> float:
    """Of the answer's tokens, as OpenAI ranks them for best_of; an answer without tokens comes last."""
    logprobs = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    finite = [logprob if math.isfinite(logprob) else _LEAST_LOGPROB for logprob in logprobs]
    return math.fsum(finite) / len(finite) if finite else -math.inf
