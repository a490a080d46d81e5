"""Masks of the requests whose answers must match a grammar, computed by a thread of its own while the model runs.

Matchers are a cache, one for each live request: made when it first samples here, built anew from its outputs wherever
it comes to. Batches without such requests cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from common.errors import GrammarError
from common.request import Request
from common.structured_output import Matcher

Masks: TypeAlias = dict[Request, np.ndarray | GrammarError]
"""For each request that has a grammar its packed bit mask, or why there is none."""


class GrammarMasks:
    def __init__(self) -> None:
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Masks] | None = None

    def start(self, requests: Iterable[Request]) -> None:
        """A step begins, with those of its requests that have a grammar; what is left of the last one is dropped."""
        self._running = None
        if not (ruled := [request for request in requests if request.grammar is not None]):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._running = self._thread.submit(self._compute, ruled)

    def finish(self, arrived: Iterable[Request]) -> Masks:
        """What was begun, and the masks of requests that joined meanwhile."""
        masks = {} if self._running is None else self._running.result()
        return masks | self._compute(request for request in arrived if request.grammar is not None)

    def _compute(self, requests: Iterable[Request]) -> Masks:
        return {request: self._mask(request) for request in requests}

    def _mask(self, request: Request) -> np.ndarray | GrammarError:
        assert request.grammar is not None
        if (matcher := self._matchers.get(request)) is None:
            matcher = self._matchers[request] = request.grammar.matcher()
        try:
            return matcher.mask(request.output_token_ids)
        except GrammarError as error:
            return error
