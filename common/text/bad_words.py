"""Bad words as sequences of token ids: what the decode node, which knows no text, keeps out of the outputs."""

from __future__ import annotations

from collections.abc import Sequence

from common.text.tokenizer import TextTokenizer


def encode_bad_words(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and after a space (as vLLM does), each spelling once.

    The model can still spell a word in other tokens than the tokenizer would, or within a longer word's token.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for spelling in (bare, " " + bare):
            if token_ids := tuple(tokenizer.encode(spelling, add_special_tokens=False)):
                found[token_ids] = None
    return tuple(found)
