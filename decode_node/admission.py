"""How one request's KV comes to a decode node: from its sources in turn, or by computing it here.

    no sources ------------------------------------------------------------> the engine computes it
    fetch opened, zero credit --reserved--> granted --all blocks in--------> adopted: RUNNING
                  |    |                      |  \\--fetch failed: next source, else adopt what is complete
                  |    |                      \\--revoked: cancel, fence, give the blocks back
                  |    \\--hidden row--> the engine samples the next output, with or without the blocks
                  \\--the source does not wait for us, or revoked: fetch anew once blocks are reserved

It knows neither sockets nor tensors; every method is called on the node's event loop, and none blocks. The blocks of
an ended request go back only after its fetch's `ended`, which is the fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from common.logging import log_event
from common.messages import Source
from common.request import Request
from kvtransfer.session import FailCode
from kvtransfer.store import FetchHandle, FetchListener, FetchRequest, HiddenMode

log = logging.getLogger(__name__)


class EngineSide(Protocol):
    """The engine's commands that an admission uses (see AsyncEngine)."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def adopt(self, request_id: str, num_computed_tokens: int) -> None: ...
    def add_hidden(self, request_id: str, row: np.ndarray) -> None: ...
    def add_prompt_hidden(self, request_id: str, start: int, rows: np.ndarray) -> None: ...
    def cancel_remote(self, request_id: str) -> None: ...
    def release_reservation(self, request_id: str) -> None: ...


OpenFetch = Callable[[Source, FetchRequest, FetchListener], FetchHandle]
Post = Callable[..., None]


class Admission:
    """One request on its way to RUNNING, and the fetch it may still hold afterwards."""

    def __init__(
        self,
        request: Request,
        sources: Sequence[Source],
        *,
        engine: EngineSide,
        open_fetch: OpenFetch,
        post: Post,
        block_size: int,
        hidden_size: int,
        queue_seconds: float,
    ) -> None:
        self.request = request
        self.num_source_cached_tokens = 0
        self.num_failed_fetches = 0
        self._tokens: list[int] = list(request.all_token_ids)
        self._sources = list(sources)
        self._engine = engine
        self._open_fetch = open_fetch
        self._post = post
        self._block_size = block_size
        self._hidden_size = hidden_size
        self._queue_seconds = queue_seconds
        self._fetch: FetchHandle | None = None
        self._fetch_number = 0
        self._block_ids: list[int] | None = None  # reserved for this request, None before and after
        self._num_complete_blocks = 0
        self._needs_all_hidden = request.is_scoring
        self._num_hidden = 0  # hidden states that came with this fetch: the last token's, or those of all in order
        self._num_submitted = 0  # of them
        self._held_rows: list[np.ndarray] = []  # those that came before the reservation
        self._has_output = False  # the hidden state of the last token came
        self._is_refused = False  # what came with this fetch was none: what follows has no place
        self._is_revoked = False
        self._is_over = False

    # --- told by the node ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.request.wants_remote_kv = bool(self._sources)
        self._engine.add(self.request)
        if self._sources:
            self._open()

    def end(self) -> None:
        """The request finished, failed or was aborted. Blocks it still waits for go back after the fence."""
        self._is_over = True
        if self._fetch is not None:
            self._fetch.cancel()
        else:
            self._engine.release_reservation(self.request.request_id)

    @property
    def is_over(self) -> bool:
        return self._is_over and self._fetch is None

    # --- told by the engine --------------------------------------------------------------------------------------

    def reserved(self, num_cached_tokens: int, block_ids: Sequence[int]) -> None:
        """Blocks for all tokens are ours; the first ones hold what the local prefix cache had."""
        if self._is_over:
            return
        self._block_ids = list(block_ids)
        self._num_complete_blocks = num_cached_tokens // self._block_size
        for rows in self._held_rows:
            self._submit(rows)
        self._held_rows.clear()
        if self._num_missing_tokens() < self._block_size:
            self._sources.clear()  # less than a block is quicker computed than fetched
        if self._fetch is None:
            self._open() if self._sources else self._adopt()
        elif self._sources:
            self._grant()
        else:
            self._fetch.cancel()

    def revoked(self) -> None:
        """A running request needs our blocks: give them back, and start over when there is room.

        Not before: computed and uncollected, our blocks would only take room from others at the source.
        """
        self._is_revoked = True
        if self._fetch is not None:
            self._fetch.cancel()
        else:
            self._give_back()

    # --- told by the fetch (through the event loop) ----------------------------------------------------------------

    def fetch_accepted(self, number: int, num_cached_tokens: int) -> None:
        if number == self._fetch_number:
            self.num_source_cached_tokens = max(self.num_source_cached_tokens, num_cached_tokens)

    def fetch_hidden(self, number: int, payload: bytes) -> None:
        if number != self._fetch_number or self._is_over or self._has_output or self._is_refused:
            return
        rows = self._read_rows(payload)
        if rows is None:
            return
        self._note("hidden_arrived", rows=len(rows))
        self._num_hidden += len(rows)
        self._has_output = self._num_hidden == self._num_hidden_wanted
        if self._block_ids is None:
            self._held_rows.append(rows)
        else:
            self._submit(rows)

    def _read_rows(self, payload: bytes) -> np.ndarray | None:
        """[num_rows, hidden_size]. None for what cannot be: nobody else's step shall fail of it, the fetch ends."""
        num_rows, rest = divmod(len(payload), 4 * self._hidden_size)
        if rest or not 1 <= num_rows <= self._num_hidden_wanted - self._num_hidden:
            log_event(
                log,
                "hidden_refused",
                level=logging.WARNING,
                request_id=self.request.request_id,
                num_bytes=len(payload),
            )
            self._is_refused = True
            if self._fetch is not None:
                self._fetch.cancel()
            return None
        return np.frombuffer(payload, np.float32).reshape(num_rows, self._hidden_size)

    def fetch_ended(self, number: int, num_complete_blocks: int, error: str | None) -> None:
        if number != self._fetch_number:
            return
        self._fetch = None
        self._note("fetch_ended", complete_blocks=num_complete_blocks, error=error)
        if self._is_over:
            self._engine.release_reservation(self.request.request_id)
        elif self._is_revoked:
            self._give_back()
        elif error is None:
            self._num_complete_blocks = max(self._num_complete_blocks, num_complete_blocks)
            self._adopt()
        elif not self._asks_again_when_reserved(error):
            self._fall_back(num_complete_blocks, error)

    # --- steps ---------------------------------------------------------------------------------------------------

    def _fall_back(self, num_complete_blocks: int, error: str) -> None:
        if self._block_ids is not None:
            self._num_complete_blocks = max(self._num_complete_blocks, num_complete_blocks)
        if self._sources:
            self.num_failed_fetches += 1
            source = self._sources.pop(0)
            request_id = self.request.request_id
            log_event(
                log, "fetch_failed", level=logging.WARNING, request_id=request_id, node=source.instance_id, error=error
            )
        if self._sources:
            self._open()
        elif self._block_ids is not None:
            self._adopt()
        else:
            self._engine.cancel_remote(self.request.request_id)

    def _asks_again_when_reserved(self, error: str) -> bool:
        """A source that did not wait for us is no bad one: nothing is lost before there is room for its blocks."""
        code = error.partition(":")[0]
        is_impatient = code == FailCode.NOT_COLLECTED or (code == FailCode.QUEUE_TIMEOUT and len(self._sources) == 1)
        return is_impatient and self._block_ids is None

    def _open(self) -> None:
        hidden: HiddenMode = "none" if self._has_output else "all" if self._needs_all_hidden else "last"
        tokens = self._tokens[: self._num_full_tokens()] if hidden == "none" else self._tokens
        if not tokens or (self._block_ids is not None and self._num_complete_blocks * self._block_size >= len(tokens)):
            self._sources.clear()
            self._fall_back(0, "nothing left to fetch")
            return
        self._fetch_number += 1
        self._is_refused = False
        if not self._has_output:  # they come anew
            self._num_hidden = self._num_submitted = 0
            self._held_rows.clear()
        request = FetchRequest(
            tokens=tokens,
            cache_salt=self.request.cache_salt,
            hidden=hidden,
            priority=self.request.priority,
            queue_seconds=self._queue_seconds,
        )
        listener = _Listener(self, self._fetch_number, self._post)
        self._fetch = self._open_fetch(self._sources[0], request, listener)
        if self._block_ids is not None:
            self._grant()

    def _grant(self) -> None:
        assert self._fetch is not None
        assert self._block_ids is not None
        first = self._num_complete_blocks
        last = -(-len(self._tokens) // self._block_size)
        self._fetch.grant(first, self._block_ids[first:last])
        self._note("fetch_granted", first_block=first, blocks=last - first)

    def _submit(self, rows: np.ndarray) -> None:
        """In the order in which they came."""
        if not self._needs_all_hidden:
            self._engine.add_hidden(self.request.request_id, rows[0])
        else:
            self._engine.add_prompt_hidden(self.request.request_id, self._num_submitted, rows)
            self._num_submitted += len(rows)

    def _adopt(self) -> None:
        computed = min(self._num_complete_blocks * self._block_size, len(self._tokens))
        self._block_ids = None
        self._engine.adopt(self.request.request_id, computed)

    def _give_back(self) -> None:
        """With an `adopt` on its way the engine gets our blocks back by that: a release would hit the next ones."""
        self._is_revoked = False
        if self._block_ids is not None:
            self._block_ids = None
            self._num_complete_blocks = 0
            self._engine.release_reservation(self.request.request_id)
        if not self._sources:
            self._engine.cancel_remote(self.request.request_id)

    def _note(self, event: str, **fields: object) -> None:
        log_event(log, event, level=logging.DEBUG, request_id=self.request.request_id, **fields)

    @property
    def _num_hidden_wanted(self) -> int:
        return len(self._tokens) if self._needs_all_hidden else 1

    def _num_full_tokens(self) -> int:
        return len(self._tokens) // self._block_size * self._block_size

    def _num_missing_tokens(self) -> int:
        return len(self._tokens) - self._num_complete_blocks * self._block_size


class _Listener:
    """Carries a fetch's events from the receiver thread to the event loop, marked with the fetch they belong to."""

    def __init__(self, admission: Admission, number: int, post: Post) -> None:
        self._admission = admission
        self._number = number
        self._post = post

    def accepted(self, num_cached_tokens: int) -> None:
        self._post(self._admission.fetch_accepted, self._number, num_cached_tokens)

    def progress(self, num_computed_tokens: int) -> None:
        pass  # the session's own clocks watch progress

    def hidden(self, rows: bytes) -> None:
        self._post(self._admission.fetch_hidden, self._number, rows)

    def ended(self, *, num_complete_blocks: int, error: str | None) -> None:
        self._post(self._admission.fetch_ended, self._number, num_complete_blocks, error)
