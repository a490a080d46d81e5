"""What an answer must match: the kind and the text of a grammar, and what a runner asks of a compiled one.

A value object: validated when made, also when it arrives by wire. Knows no tokenizer and compiles nothing
(`common/grammar` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    kind, text: json_schema and a schema, json_object and nothing, regex and an expression that the whole answer
        matches, choice and a JSON list of strings, grammar and a grammar of Lark or GBNF.
    field: where the client wrote it; for error messages only.

    Raises ValueError (msgspec.ValidationError on decoding) naming the field, the size and the limit.
    """

    kind: Kind
    text: str = ""
    field: str = "structured_output"

    def __post_init__(self) -> None:
        if len(self.field) > 128:
            raise ValueError(f"the name of a structured output has {len(self.field)} characters, at most 128 are known")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{self.field} holds a lone surrogate, which is no character") from None
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{self.field} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")


class Matcher(Protocol):
    """Follows the outputs of one request. A cache: what it says depends on the outputs alone."""

    def mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        """The tokens that may follow these outputs, at least one: int32, a bit for each token, lowest bit first.

        Raises GrammarError when none may, or the grammar is too costly to go on with.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar; many requests may share one."""

    def matcher(self) -> Matcher: ...
