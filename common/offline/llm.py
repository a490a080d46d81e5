"""`LLM`: generation without a server, in the caller's thread.

llm = LLM("smollm2-135m-instruct")
for output in llm.generate(["The sky is", "2 + 2 ="], SamplingParams(max_tokens=8)):
    print(output.prompt, output.outputs[0].text)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL
from common.engine.build import build_engine
from common.errors import InvalidRequestError, TandemError
from common.offline.answers import PromptAnswers
from common.offline.flags import make_flags
from common.offline.frontend import Frontend
from common.offline.outputs import RequestOutput
from common.offline.params import SamplingParams
from common.offline.prompts import Message, Prompt, as_conversations, as_prompts
from common.text.tokenizer import TextTokenizer

_QUEUED_PER_SEAT = 2  # prompts in the engine for each sequence that can run: enough that no seat is ever empty


class LLM:
    """A model and its engine. model: alias, local directory, GGUF file or Hub id.

    flags: the server's flags as keywords (dtype, max_model_len, enable_prefix_caching, ...). A TANDEM_* environment
    variable counts where a keyword is not given. Raises ConfigError naming a keyword that is wrong, CheckpointError.

    Threads may share it: one of them generates, the others wait until it is done.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **flags: Any) -> None:
        self._flags = make_flags(model, flags)
        model_dir = resolve_model(self._flags.model)
        parts = build_engine(model_dir, self._flags, with_head=True)
        self._engine = parts.engine
        self._frontend = Frontend(model_dir, self._flags, parts)
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """An output for each prompt, in order.

        prompts: one or many texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`.
        sampling_params: for all, or one for each; None: the model's own defaults. use_tqdm: a progress bar with
            tokens a second, on terminals only.

        Raises InvalidRequestError before anything is generated if a prompt or its parameters are wrong. What fails
        later says so in its output (`finish_reason` "error").
        """
        return self._generate(as_prompts(prompts), sampling_params, use_tqdm=use_tqdm, is_chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """The same for one conversation or many: lists of {"role": ..., "content": ...}, rendered by the model's chat
        template. content: a text, or a list of {"type": "text", "text": ...}, which are joined by line breaks."""
        conversations = as_conversations(messages)
        prompts: list[Prompt] = []
        for number, conversation in enumerate(conversations):
            with _named("conversation", number, len(conversations)):
                prompts.append(self._frontend.render(conversation, add_generation_prompt=add_generation_prompt))
        return self._generate(prompts, sampling_params, use_tqdm=use_tqdm, is_chat=True)

    def get_tokenizer(self) -> TextTokenizer:
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes without sampling_params."""
        return self._frontend.default_params()

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones."""
        with self._lock:
            self._engine.reset_prefix_cache()

    # --- running ----------------------------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        is_chat: bool,
    ) -> list[RequestOutput]:
        all_params = self._one_for_each(prompts, sampling_params)
        with self._lock:
            answers: list[PromptAnswers] = []
            for number, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
                with _named("conversation" if is_chat else "prompt", number, len(prompts)):
                    answers.append(self._frontend.prepare(prompt, params, is_chat=is_chat))
            with _Progress(len(answers), is_shown=use_tqdm) as progress:
                self._run(answers, progress)
        return [one.output() for one in answers]

    def _one_for_each(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self._frontend.default_params()
        if not isinstance(params, Sequence):  # also what is no SamplingParams: it is refused with its prompt
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(params)} sampling_params, must be equal"
            )
        return params

    def _run(self, answers: Iterable[PromptAnswers], progress: _Progress) -> None:
        waiting, running = deque(answers), _Running()
        most = _QUEUED_PER_SEAT * self._flags.max_num_seqs
        try:
            while waiting or running.num_unfinished:
                while waiting and running.num_unfinished < most:
                    one = waiting.popleft()
                    running.add(one)
                    self._engine.add(one.request)
                self._step(running, progress)
        finally:
            for engine_id in running.engine_ids:  # after an error or Ctrl-C; the engine can go on
                self._engine.abort(engine_id)

    def _step(self, running: _Running, progress: _Progress) -> None:
        for event in self._engine.step():
            if (one := running.find(event.request_id)) is None:
                continue
            if (aborted := one.take(event)) is not None:
                self._engine.abort(aborted)
            if one.is_finished:
                running.remove(one)
                progress.finished(one.output())


@contextmanager
def _named(kind: str, number: int, total: int) -> Iterator[None]:
    """Says in errors which of several prompts is wrong."""
    try:
        yield
    except TandemError as error:
        if total > 1:
            error.message = f"{kind} {number}: {error.message}"
            error.args = (error.message,)
        raise


class _Running:
    """Prompts in the engine, by the ids that their events have."""

    def __init__(self) -> None:
        self.engine_ids: dict[str, PromptAnswers] = {}
        self.num_unfinished = 0

    def find(self, engine_id: str) -> PromptAnswers | None:
        return self.engine_ids.get(engine_id)

    def add(self, one: PromptAnswers) -> None:
        self.num_unfinished += 1
        self.engine_ids.update(dict.fromkeys(one.engine_ids, one))

    def remove(self, one: PromptAnswers) -> None:
        self.num_unfinished -= 1
        for engine_id in one.engine_ids:
            del self.engine_ids[engine_id]


class _Progress:
    """A bar of prompts, with the tokens a second that went in and came out."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._bar: tqdm[Any] = tqdm(
            total=total,
            desc="prompts",
            dynamic_ncols=True,
            disable=None if is_shown else True,  # None: off a terminal
        )
        self._num_inputs = self._num_outputs = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def finished(self, output: RequestOutput) -> None:
        self._num_inputs += len(output.prompt_token_ids)
        self._num_outputs += sum(len(answer.token_ids) for answer in output.outputs)
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-9)
            speeds = f"input {self._num_inputs / seconds:.1f} tok/s, output {self._num_outputs / seconds:.1f} tok/s"
            self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update()
