"""Compiles what an answer must match into masks over a model's vocabulary (llguidance). No torch.

The vocabulary is read at the first use; compiled grammars are kept by their text. From any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from common.errors import CheckpointError, GrammarError, InvalidRequestError
from common.grammar.complaints import refusal
from common.grammar.matcher import CompiledGrammar
from common.structured_output import Kind, StructuredOutput

MAX_KEPT = 128

_LIMITS = LLParserLimits(max_lexer_states=50_000, step_max_items=20_000, verbose_errors=False)
"""A step's mask takes at most some 50 ms of a core; the library's other limits stay as they are."""

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of a JSON text; without an end, a small model likes to write nothing else."""


class GrammarCompiler:
    """For the model in `model_dir`, whose output layer is `vocab_size` wide.

    eos_token_ids: what ends an answer; allowed where the grammar may end, and only there.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=MAX_KEPT)(self._compile)

    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Raises InvalidRequestError naming the field and what is wrong with the grammar."""
        try:
            return self._compiled(wanted.kind, wanted.text)
        except CheckpointError as error:
            text = error.message
        except (GrammarError, ValueError) as error:
            text = refusal(wanted.kind, str(error))
        raise InvalidRequestError(f"{wanted.field}: {text}", param=wanted.field)

    def _compile(self, kind: Kind, text: str) -> CompiledGrammar:
        vocabulary, source = self._load_vocabulary(), _as_llguidance(kind, text)

        def make() -> LLMatcher:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
            return matcher

        return CompiledGrammar(make)

    def _load_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise CheckpointError("this model has no end token, and so no answer of it can end where a grammar does")
        path = self._model_dir / "tokenizer.json"
        try:
            return LLTokenizer(path.read_text(), n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"this model's tokenizer cannot be used for grammars: {error}") from None


def _as_llguidance(kind: Kind, text: str) -> str:
    """Raises ValueError for a text that is no JSON where it must be, or no grammar."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    if kind == "json_object":
        return _as_llguidance("json_schema", '{"type":"object"}')
    if kind == "choice":
        msgspec.json.decode(text, type=Annotated[list[str], msgspec.Meta(min_length=1)])
    if kind == "grammar":
        text = _without_blank_lines(text)
    return grammar_from(kind, text)


def _without_blank_lines(text: str) -> str:
    """The library looks for the dialect by an expression that takes the square of their number (60,000: 27 s)."""
    return "\n".join(line for line in text.split("\n") if line.strip())
