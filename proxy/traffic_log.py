"""A line every few seconds while requests run: tokens a second, what runs and what waits. Silent when nothing does.

traffic requests=3 waiting=0 nodes=2 output_tokens_per_second=41.8 prompt_tokens_per_second=0 ended=1
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.logging import log_event

log = logging.getLogger(__name__)

TRAFFIC_SECONDS = 5.0


@dataclass
class Totals:
    """Since the proxy's start. num_prompt_tokens: of prompts whose first output came. num_ended: answers."""

    num_prompt_tokens: int = 0
    num_outputs: int = 0
    num_ended: int = 0


@dataclass(frozen=True)
class Load:
    """Now: requests (prompts) that are not over, those of them that wait for a place, joined nodes."""

    num_requests: int
    num_waiting: int
    num_nodes: int


class TrafficLog:
    def __init__(self, totals: Totals, load: Callable[[], Load], *, seconds: float = TRAFFIC_SECONDS) -> None:
        self._totals = totals
        self._load = load
        self._seconds = seconds
        self._last = Totals()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            self.write(self._seconds)

    def write(self, seconds: float) -> None:
        """What came in the last `seconds`, if there was anything."""
        totals, last, load = self._totals, self._last, self._load()
        self._last = Totals(totals.num_prompt_tokens, totals.num_outputs, totals.num_ended)
        if self._last == last and not load.num_requests:
            return
        log_event(
            log,
            "traffic",
            requests=load.num_requests,
            waiting=load.num_waiting,
            nodes=load.num_nodes,
            output_tokens_per_second=round((totals.num_outputs - last.num_outputs) / seconds, 1),
            prompt_tokens_per_second=round((totals.num_prompt_tokens - last.num_prompt_tokens) / seconds, 1),
            ended=totals.num_ended - last.num_ended,
        )
