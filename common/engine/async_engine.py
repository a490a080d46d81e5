"""An engine in a thread of its own. Knows no event loop and no node: commands come in from any thread, events go out
through one callback.

    any thread:     add abort release adopt add_hidden cancel_remote release_reservation reset_prefix_cache
                      |  a queue, applied in order between two steps
    engine thread:  hidden rows, commands -> schedule -> on_events -> execute, update -> on_events -> ...
                      |  nothing to do: check the books once, sleep until a command or a hidden row comes
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from common.engine.engine import Engine
from common.engine.events import Event, FailedEvent
from common.errors import TandemError, UnavailableError
from common.messages import NodeStats
from common.request import Request
from common.scheduling.output import SchedulerOutput

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

OnEvents = Callable[[list[Event]], None]
Command = Callable[[], object]


class AsyncEngine:
    """on_events: called from the engine's thread, at most twice a step (after scheduling, after computing), never
    with an empty list; it must not block. on_failure: called once, from that thread, when an invariant broke and the
    engine ended by itself. Commands on requests that are not known any more do nothing."""

    def __init__(
        self,
        engine: Engine,
        on_events: OnEvents,
        *,
        on_failure: Callable[[BaseException], None] | None = None,
        name: str = "engine",
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_failure = on_failure
        self._commands: deque[Command] = deque()
        self._wakeup = threading.Condition()
        self._is_stopping = False
        self._is_checked = False  # the books were checked since the last step
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None
        """What ended the thread, if it was no `stop`."""

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread after the step in flight and waits for it; commands not yet applied are dropped."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # --- commands ---------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """See `common.scheduling.limits.check_fits`."""
        self._engine.check_fits(request)

    def add(self, request: Request) -> None:
        """Raises as `check_fits`, or UnavailableError when the engine ended; what only its queue can tell comes as a
        FailedEvent."""
        if self.failure is not None or self._is_stopping:
            raise UnavailableError("the engine has ended")
        self._engine.check_fits(request)
        self._submit(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps, or the step in flight when it computes for nobody else."""
        self._engine.mark_unwanted(request_id)
        self._submit(partial(self._engine.abort, request_id))

    def release(self, request_id: str) -> None:
        """Nobody reads a computation's blocks any more; one that still computes is ended as by `abort`."""
        self._engine.mark_unwanted(request_id)
        self._submit(partial(self._engine.release, request_id))

    def adopt(self, request_id: str, num_computed_tokens: int) -> None:
        """KV of the first `num_computed_tokens` tokens is in the reserved blocks, and the fence has passed."""
        self._submit(partial(self._engine.adopt, request_id, num_computed_tokens))

    def release_reservation(self, request_id: str) -> None:
        """The fence has passed: nothing writes into the blocks reserved for this request."""
        self._submit(partial(self._engine.release_reservation, request_id))

    def cancel_remote(self, request_id: str) -> None:
        """Its KV will not be fetched, and nothing was written into its blocks: it is computed here."""
        self._submit(partial(self._engine.cancel_remote, request_id))

    def add_hidden(self, request_id: str, row: np.ndarray, num_tokens: int | None = None) -> None:
        """A hidden state computed elsewhere, float32 [hidden_size]; joins the step in flight if that still can take
        it. See `Engine.add_hidden`."""
        if self._engine.add_hidden(request_id, row, num_tokens):
            self._wake()
        else:  # its `add` may still be in the queue
            self._submit(partial(self._engine.add_hidden, request_id, row, num_tokens))

    def add_prompt_hidden(self, request_id: str, start: int, rows: np.ndarray) -> None:
        """See `Engine.add_prompt_hidden`."""
        self._submit(partial(self._engine.add_prompt_hidden, request_id, start, rows))

    def reset_prefix_cache(self) -> None:
        self._submit(self._engine.reset_prefix_cache)

    def check_integrity(self, timeout_seconds: float = 10.0) -> None:
        """Runs the whole check between two steps; raises what it raises (AssertionError), or TimeoutError."""
        answer: Future[None] = Future()
        self._submit(partial(_answer, answer, self._engine.scheduler.check_integrity))
        answer.result(timeout_seconds)

    def stats(self) -> NodeStats:
        """Load now and counters."""
        return self._engine.stats()

    def _submit(self, command: Command) -> None:
        with self._wakeup:
            self._commands.append(command)
            self._wakeup.notify()

    def _wake(self) -> None:
        with self._wakeup:
            self._wakeup.notify()

    # --- engine thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._apply_commands()
                self._step()
        except BaseException as error:
            log.critical("the engine ended", exc_info=True)
            self._end_all(error)

    def _step(self) -> None:
        batch, events = self._engine.schedule()
        self._deliver(events)
        if not batch.is_idle or self._engine.inbox:
            self._is_checked = False
            self._deliver(self._engine.execute(batch))
        elif not self._is_checked:
            self._engine.scheduler.cache.check_counts()
            self._is_checked = True
        else:
            self._sleep()

    def _sleep(self) -> None:
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._commands or self._is_stopping or self._engine.inbox)

    def _apply_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            self._sample_arrived()
            try:
                command()
            except TandemError as error:
                log.warning("a command was refused: %s", error)
        self._sample_arrived()

    def _sample_arrived(self) -> None:
        """Hidden rows that are here give their outputs at once: a head alone is much shorter than a step. Looked at
        before every command, because an `adopt` that follows its row would have the last token computed again."""
        if self._engine.inbox.has_outputs:
            self._is_checked = False
            self._deliver(self._engine.execute(SchedulerOutput()))

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except TandemError as error:
            self._deliver([FailedEvent(request.request_id, error.message)])

    def _deliver(self, events: list[Event]) -> None:
        if not events:
            return
        try:
            self._on_events(events)
        except Exception:
            log.exception("the receiver of %d events failed", len(events))

    def _end_all(self, error: BaseException) -> None:
        """An invariant is broken: nobody waits for an engine that ended."""
        self.failure = error
        text = f"the engine ended: {type(error).__name__}"
        self._deliver([FailedEvent(request_id, text) for request_id in list(self._engine.scheduler.requests)])
        if self._on_failure is not None:
            self._on_failure(error)


def _answer(answer: Future[None], check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        answer.set_exception(error)
    else:
        answer.set_result(None)
