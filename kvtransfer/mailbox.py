"""A queue from any thread to one that waits in a poll: putting something in makes a file descriptor readable."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """`fd` is readable while there is something to take, and after `wake`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[_T] = deque()
        self._is_woken = False
        self._is_closed = False
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def put(self, item: _T) -> bool:
        """False: the mailbox is closed, nobody will take it."""
        with self._lock:
            if self._is_closed:
                return False
            self._items.append(item)
            self._signal()
            return True

    def wake(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._signal()

    def take_all(self) -> list[_T]:
        with self._lock:
            items = list(self._items)
            self._items.clear()
            if self._is_woken and not self._is_closed:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.fd, 1)
                self._is_woken = False
            return items

    def close(self) -> list[_T]:
        """Nothing can be put in any more; returns what nobody took."""
        items = self.take_all()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                items += self._items
                self._items.clear()
                os.close(self.fd)
                os.close(self._write_fd)
            return items

    def _signal(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            os.write(self._write_fd, b"\0")
