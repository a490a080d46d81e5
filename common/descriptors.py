"""File descriptors: as many as this process may have, and a word before they run out.

Every connection takes one, also of somebody who only dials and says nothing. When none is left, nobody is let in, and
ZMQ's thread tries again and again without a word of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from typing import Final, NoReturn

from common.clock import Clock, SystemClock
from common.logging import FailureLog

log = logging.getLogger(__name__)

MAX_WANTED: Final = 2**20  # containers may allow a thousand times as many, which only makes tables larger
LOOK_SECONDS: Final = 1.0
_WORRYING_SHARE: Final = 0.9


def raise_descriptor_limit() -> None:
    """To the most that whoever started this process allows; the usual 1024 are for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_WANTED if hard == resource.RLIM_INFINITY else min(hard, MAX_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorWatch:
    """Warns now and then while they are nearly used up."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._failures = FailureLog(log)

    async def run(self) -> NoReturn:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and _lowest_free(limit) >= _WORRYING_SHARE * limit:
            text = (
                f"nearly all of the {limit} file descriptors that this process may have are in use: soon it cannot take"
                " connections any more; see who connects, or allow more (ulimit -n, LimitNOFILE=, --ulimit nofile=)"
            )
            self._failures.note(self._clock.now(), text)


def _lowest_free(limit: int) -> int:
    """The kernel gives out the lowest number that is free, so this says how many are taken."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return limit
    os.close(descriptor)
    return descriptor
