"""Compiles the grammars of requests in threads of its own: the event loop and the engine go on meanwhile.

compile   milliseconds, bounded by the library's limits -> Grammar
          it is none, or takes too long                 -> InvalidRequestError
          too many others wait before it                -> OverloadedError, another node may take it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from common.errors import InvalidRequestError, OverloadedError, TandemError
from common.structured_output import Grammar, StructuredOutput

log = logging.getLogger(__name__)

_NUM_THREADS = 2


class Grammars:
    """compile_grammar: called in a thread; raises InvalidRequestError. deadline_seconds: less than a proxy waits for an
    answer to its Decode."""

    def __init__(
        self, compile_grammar: Callable[[StructuredOutput], Grammar], *, deadline_seconds: float = 5.0
    ) -> None:
        self._compile_grammar = compile_grammar
        self._deadline_seconds = deadline_seconds
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    async def compile(self, wanted: StructuredOutput) -> Grammar:
        """Raises InvalidRequestError or OverloadedError, and nothing else."""
        job = self._threads.submit(self._compile_grammar, wanted)
        try:
            async with asyncio.timeout(self._deadline_seconds):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise self._late(wanted, job) from None
        except TandemError:
            raise
        except Exception as error:  # the request must be answered
            log.exception("a grammar could not be compiled")
            text = f"{wanted.field} could not be compiled: {type(error).__name__}"
            raise InvalidRequestError(text, param=wanted.field) from None

    def _late(self, wanted: StructuredOutput, job: Future[Grammar]) -> TandemError:
        if job.cancelled():
            return OverloadedError(f"{wanted.field} waited {self._deadline_seconds:g} s for other grammars")
        text = f"{wanted.field} was not compiled within {self._deadline_seconds:g} s, must be simpler"
        return InvalidRequestError(text, param=wanted.field)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
