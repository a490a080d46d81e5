"""best_of: of the choices that were generated for each prompt, those that the model holds for the most likely."""

from __future__ import annotations

from collections.abc import Sequence

from common.text.best_of import mean_logprob
from proxy.openai_response import ChoiceText


def select_best(choices: Sequence[ChoiceText], num_generated: int, num_returned: int) -> list[ChoiceText]:
    """`num_generated` choices of each prompt, one prompt after the other; of each the best `num_returned`, best first.

    By the mean log-probability of the answer's tokens, as OpenAI ranks them; the earlier one of two that are equal.
    """
    if num_generated == num_returned:
        return list(choices)
    best: list[ChoiceText] = []
    for start in range(0, len(choices), num_generated):
        ranked = sorted(
            choices[start : start + num_generated], key=lambda choice: mean_logprob(choice.tokens), reverse=True
        )
        best += ranked[:num_returned]
    return best
