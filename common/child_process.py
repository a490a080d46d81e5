"""A process that must not outlive the one that started it: on Linux the kernel kills it when that one dies, however
that happens. Knows nothing of what runs there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """`preexec_fn` of a process that this one starts now, from a thread that lives as long as that process."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded here: after a fork it might not be possible
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)

    return prepare
