"""`AsyncLLM`: the same for programs with an event loop. Answers come while they are generated.

llm = AsyncLLM("smollm2-135m-instruct")
async for output in llm.generate("The sky is", SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)     # the answer so far
await llm.shutdown()
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL
from common.engine.async_engine import AsyncEngine
from common.engine.build import build_engine
from common.engine.events import Event, FailedEvent, OutputEvent, SearchEndedEvent
from common.errors import InvalidRequestError, UnavailableError
from common.offline.answers import PromptAnswers
from common.offline.flags import make_flags
from common.offline.frontend import Frontend
from common.offline.outputs import RequestOutput
from common.offline.params import SamplingParams
from common.offline.prompts import Message, Prompt
from common.text.tokenizer import TextTokenizer


class AsyncLLM:
    """A model and its engine, which runs in a thread of its own. Keywords and errors are `LLM`'s. Belongs to the event
    loop that first generates."""

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **flags: Any) -> None:
        config = make_flags(model, flags)
        model_dir = resolve_model(config.model)
        parts = build_engine(model_dir, config, with_head=True)
        self._frontend = Frontend(model_dir, config, parts)
        self._engine = AsyncEngine(parts.engine, self._on_events, name="async-llm")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output as it grows; the last one is `finished`. Closing the generator, or cancelling the task, aborts it.

        A consumer that is slow gets fewer outputs. Raises what `LLM.generate` raises, before the first one.
        """
        return self._generate(prompt, sampling_params, request_id, is_chat=False)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a conversation, rendered by the model's chat template."""
        return self._generate(self._frontend.render(messages), sampling_params, request_id, is_chat=True)

    async def abort(self, request_id: str) -> None:
        """Ends a request; whoever iterates over it gets no more outputs."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.end()

    async def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    async def get_tokenizer(self) -> TextTokenizer:
        return self._frontend.tokenizer

    async def shutdown(self) -> None:
        """Ends all requests and the engine's thread."""
        for stream in list(self._streams.values()):
            stream.end()
        await asyncio.to_thread(self._engine.stop)

    # --- one request ------------------------------------------------------------------------------------------------

    async def _generate(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, *, is_chat: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        self._start()
        params = self._frontend.default_params() if params is None else params
        request_id = request_id or f"request-{next(self._numbers)}"
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = _Stream(self._engine.abort)
        try:
            stream.answers = await asyncio.to_thread(
                self._frontend.prepare, prompt, params, request_id=request_id, is_chat=is_chat
            )
            if stream.is_over:
                return
            self._streams.update(dict.fromkeys(stream.answers.engine_ids, stream))
            self._engine.add(stream.answers.request)
            while await stream.has_news():
                yield stream.answers.output()
        finally:
            stream.end()
            self._streams.pop(request_id, None)
            for engine_id in stream.answers.engine_ids if stream.answers else ():
                self._streams.pop(engine_id, None)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._engine.start()
        if self._loop is not loop:
            raise UnavailableError("this AsyncLLM runs on another event loop")

    def _on_events(self, events: list[Event]) -> None:
        """In the engine's thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, events)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if (stream := self._streams.get(event.request_id)) is not None:
                stream.take(event)


class _Stream:
    """What one consumer waits for. abort: tells the engine that nobody wants a request any more."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._wakeup = asyncio.Event()
        self._is_aborted = False
        self._was_last = False
        self.answers: PromptAnswers | None = None

    @property
    def is_over(self) -> bool:
        return self._is_aborted or (self.answers is not None and self.answers.is_finished)

    def take(self, event: Event) -> None:
        assert self.answers is not None
        if (aborted := self.answers.take(event)) is not None:
            self._abort(aborted)
        if isinstance(event, OutputEvent | SearchEndedEvent | FailedEvent):
            self._wakeup.set()

    async def has_news(self) -> bool:
        """Waits for them; False when there will be none."""
        if self._was_last:
            return False
        await self._wakeup.wait()
        self._wakeup.clear()
        self._was_last = self.is_over
        return not self._is_aborted

    def end(self) -> None:
        if not self.is_over and self.answers is not None:
            for engine_id in self.answers.engine_ids:
                self._abort(engine_id)
        self._is_aborted = self._is_aborted or not self.is_over
        self._wakeup.set()
