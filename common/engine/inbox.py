"""Hidden states computed elsewhere, on their way to this engine's head. Any thread puts, the step in flight takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.request import Request, RequestStatus
from common.scheduling.output import HiddenRow, PromptRows

if TYPE_CHECKING:
    import numpy as np

Accepts = Callable[[str, int], Request | None]

_MAX_PROMPT_ROWS = 32
"""Of one step: the head takes some 20 ms for them on a CPU, and those that stream wait so long."""


class HiddenInbox:
    """Rows wait here until a step polls them; one that fits no request any more is dropped then.

    accepts(request_id, num_tokens): the request whose next output this row gives, or None.
    find(request_id): the request, if it has not finished.
    """

    def __init__(self, accepts: Accepts, find: Callable[[str], Request | None]) -> None:
        self._accepts = accepts
        self._find = find
        self._lock = threading.Lock()
        self._rows: list[tuple[str, int, np.ndarray]] = []
        self._prompt_rows: deque[tuple[str, int, np.ndarray]] = deque()
        self._taken: list[tuple[str, int, np.ndarray]] = []
        self._taken_requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._rows) + len(self._prompt_rows)

    @property
    def has_outputs(self) -> bool:
        return bool(self._rows)

    def put(self, request_id: str, num_tokens: int, row: np.ndarray) -> None:
        """`row`, float32 [hidden_size], is the hidden state of the request's token `num_tokens - 1`."""
        with self._lock:
            self._rows.append((request_id, num_tokens, row))

    def put_prompt_rows(self, request_id: str, start: int, rows: np.ndarray) -> None:
        """`rows`, float32 [num_rows, hidden_size]: of its prompt's tokens from position `start` on, in order. The
        last token's gives an output as one that was `put`, when those before it have been taken."""
        with self._lock:
            self._prompt_rows.append((request_id, start, rows))

    def has_prompt_rows(self, request_id: str) -> bool:
        with self._lock:
            return any(item[0] == request_id for item in self._prompt_rows)

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
            if request is not None and all(row.request is not request for row in found):
                found.append(HiddenRow(request, item[2]))  # a repeated row gives no second output
                self._taken.append(item)
                self._taken_requests.append(request)
        return found

    def take_prompt_rows(self) -> list[PromptRows]:
        found: list[PromptRows] = []
        ends: dict[str, int] = {}  # how far the rows go that this step has of a request
        num_left = _MAX_PROMPT_ROWS
        while num_left and (item := self._pop_prompt_rows(num_left)) is not None:
            request_id, start, rows = item
            request = self._find(request_id)
            if request is None or request.status is RequestStatus.RUNNING:  # that one computes them itself
                continue
            if (num_known := ends.get(request_id, request.num_scored_tokens - 1) - start) < 0:
                continue
            if start + len(rows) == request.num_prompt_tokens:
                self.put(request_id, request.num_prompt_tokens, rows[-1])
                rows = rows[:-1]
            if num_known < len(rows):  # a source that followed another began anew
                found.append(PromptRows(request, start + num_known, rows[num_known:]))
                ends[request_id] = start + len(rows)
                num_left -= len(rows) - num_known
                self._taken_requests.append(request)
        return found

    def _pop_prompt_rows(self, most: int) -> tuple[str, int, np.ndarray] | None:
        with self._lock:
            if not self._prompt_rows:
                return None
            request_id, start, rows = self._prompt_rows.popleft()
            if len(rows) > most:
                self._prompt_rows.appendleft((request_id, start + most, rows[most:]))
            return request_id, start, rows[:most]

    def give_back(self) -> None:
        """The step was left: its rows wait for the next one."""
        with self._lock:
            self._rows[:0] = self._taken

    @property
    def num_outputs_taken(self) -> int:
        """Rows that this step samples outputs from."""
        return len(self._taken)

    def taken(self) -> list[Request]:
        """Requests whose rows this step took."""
        return list(self._taken_requests)
