"""Hidden states computed elsewhere, on their way to this engine's head. Any thread puts, the step in flight takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.request import Request
from common.scheduling.output import HiddenRow

if TYPE_CHECKING:
    import numpy as np

Accepts = Callable[[str, int], Request | None]


class HiddenInbox:
    """Rows wait here until a step polls them; one that fits no request any more is dropped then.

    accepts(request_id, num_tokens): the request whose next output this row gives, or None.
    """

    def __init__(self, accepts: Accepts) -> None:
        self._accepts = accepts
        self._lock = threading.Lock()
        self._rows: list[tuple[str, int, np.ndarray]] = []
        self._taken: list[tuple[str, int, np.ndarray]] = []
        self._taken_requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, request_id: str, num_tokens: int, row: np.ndarray) -> None:
        """`row`, float32 [hidden_size], is the hidden state of the request's token `num_tokens - 1`."""
        with self._lock:
            self._rows.append((request_id, num_tokens, row))

    def open(self) -> None:
        """A step begins: what the last one took is done with."""
        self._taken.clear()
        self._taken_requests.clear()

    def take(self) -> list[HiddenRow]:
        with self._lock:
            arrived, self._rows = self._rows, []
        found: list[HiddenRow] = []
        for item in arrived:
            request = self._accepts(item[0], item[1])
            if request is not None and request not in self._taken_requests:  # a repeated row gives no second output
                found.append(HiddenRow(request, item[2]))
                self._taken.append(item)
                self._taken_requests.append(request)
        return found

    def give_back(self) -> None:
        """The step was left: its rows wait for the next one."""
        with self._lock:
            self._rows[:0] = self._taken

    def taken(self) -> list[Request]:
        """Requests whose rows this step took."""
        return list(self._taken_requests)
