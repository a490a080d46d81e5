"""SIGTERM as Ctrl-C, for commands that have something to take back when they are ended half-way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, from which this is called. A signal that whoever
    started us has us ignore (nohup) stays ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if not is_ignored(number)]
    before = [(number, signal.signal(number, signal.default_int_handler)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
