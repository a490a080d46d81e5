"""A compiled grammar, and the place in it that one request's outputs have come to (llguidance).

Copies of a matcher share the automaton that its lexer builds as it goes, which makes masks quick and has a limit. An
error therefore is believed only of an automaton of one's own: the matcher is built anew from the outputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from common.errors import GrammarError
from common.grammar.complaints import essential


class CompiledGrammar:
    """compile: makes a matcher at the start of the grammar; one with an error cannot be made."""

    def __init__(self, compile_matcher: Callable[[], LLMatcher]) -> None:
        self._compile = compile_matcher
        self._start = compile_matcher()
        self.matcher().mask(())

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self)

    def start(self) -> LLMatcher:
        """At the start of the grammar, with the automaton that all share."""
        return self._start.deep_copy()

    def renew(self) -> LLMatcher:
        """At the start of the grammar, with a new automaton, which all share from now on."""
        self._start = self._compile()
        return self.start()


class GrammarMatcher:
    """See `common.structured_output.Matcher`. Used by one thread at a time."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start()
        self._num_consumed = 0

    def mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        try:
            return self._mask(output_token_ids)
        except GrammarError:
            self._matcher, self._num_consumed = self._grammar.renew(), 0
            return self._mask(output_token_ids)

    def _mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        new = list(output_token_ids[self._num_consumed :])
        if new and not self._matcher.consume_tokens(new):
            first, last = self._num_consumed, len(output_token_ids) - 1
            raise GrammarError(f"the grammar does not go on with outputs {first} to {last}: {self._complaint()}")
        self._num_consumed = len(output_token_ids)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar gave up after {self._num_consumed} outputs: {self._complaint()}")
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            raise GrammarError(f"no text that matches the grammar goes on after {self._num_consumed} outputs")
        return mask

    def _complaint(self) -> str:
        error = self._matcher.get_error()
        return essential(error) if error else "they do not match"
