"""Prompts and conversations: every form that is understood, and how the others are refused. Two threads in one LLM."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.engine import Engine
from common.errors import InvalidRequestError
from common.offline.async_llm import AsyncLLM
from common.offline.llm import LLM
from common.offline.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "fox"}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is None, must be a text or a list of token ids, or a list of such prompts"),
        (5, "prompts is 5, must be a text"),
        ({5, 6}, "prompts is {5, 6}, must be a text"),
        ([None], "the prompt is None, must be a text or a list of token ids"),
        ([5.0], "the prompt has 5.0 among its token ids"),
        ([5, True], "the prompt has True among its token ids"),
        ([5, "a"], "the prompt has 'a' among its token ids"),
        (b"abc", "the prompt is b'abc', must be a text"),
        ([b"abc"], "the prompt is b'abc', must be a text"),
        ("a\ud800", "prompt holds a lone surrogate, which is no character"),
        ({"prompt": None}, "the prompt is None, must be a text"),
        ({"prompt_token_ids": {5, 6}}, "the prompt is {5, 6}, must be a text"),
        ({5: 1, "a": 2}, "a prompt has the keys [5, 'a'], must have one of prompt, prompt_token_ids"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        llm.generate(prompts, GREEDY)
    assert raised.value.message.startswith(message)


def test_arrays_tuples_and_ranges_are_token_ids(llm: LLM) -> None:
    def ids_of(prompts: Any) -> list[list[int]]:
        return [out.prompt_token_ids for out in llm.generate(prompts, GREEDY)]

    assert ids_of(np.array([5, 6, 7])) == ids_of(range(5, 8)) == ids_of((5, 6, 7)) == [[5, 6, 7]]
    assert ids_of(np.array([[5, 6], [7, 8]])) == ids_of([[np.int64(5), 6], (7, 8)]) == [[5, 6], [7, 8]]
    assert ids_of({"prompt_token_ids": np.array([5])}) == ids_of(iter([[5]])) == [[5]]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is None, must be a list of messages"),
        ("fox", "messages is 'fox', must be a list of messages"),
        (USER, "messages is {'role': 'user', 'content': 'fox'}, must be a list"),
        ([5], "messages[0] is 5, must be a dict with role and content"),
        ([USER, None], "messages[1] is None, must be a dict with role and content"),
        ([{}], "messages[0] has no role, must have role and content"),
        ([{"role": "user"}], "messages[0] has no content, must have role and content"),
        ([{"role": 5, "content": "a"}], "messages[0].role is 5, must be a text"),
        ([{"role": "user", "content": None}], "messages[0].content is None, must be a text or a list of text parts"),
        ([{"role": "user", "content": "\ud800"}], "messages holds a lone surrogate"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[1] is of type 'image_url', which is not supported",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] is 'a', must be {"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0] is {'type': 'text', "),
        ([[USER], []], "conversation 1: messages is empty, must be a list of messages"),
        ([[USER], 5], "conversation 1: messages is 5, must be a list of messages"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        llm.chat(messages, GREEDY)
    assert raised.value.message.startswith(message)
    assert raised.value.param == "messages"


async def test_an_async_llm_refuses_the_same(model_dir: Path) -> None:
    llm = AsyncLLM(str(model_dir), num_gpu_blocks_override=64, num_threads=1)
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(InvalidRequestError, match="the prompt is None"):
        await anext(llm.generate(None))
    with pytest.raises(InvalidRequestError, match="sampling_params is 0, must be SamplingParams"):
        await anext(llm.generate("the", 0))
    await llm.shutdown()


def test_text_parts_are_joined_by_line_breaks(llm: LLM) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    [out] = llm.chat([{"role": "user", "content": parts}], GREEDY)
    [same] = llm.chat([{"role": "user", "content": "the\nfox"}], GREEDY)
    assert (out.prompt, out.outputs) == (same.prompt, same.outputs)
    assert llm.chat([]) == [], "no conversation, as no prompt"


class AnnouncingLock:
    """Says when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_second_thread_waits_until_the_first_is_done(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"generate": ["the fox"] * 20, "chat": [[USER]] * 20}
    expected = [one.outputs for name in prompts for one in getattr(llm, name)(prompts[name], GREEDY)]
    step, lock, who = Engine.step, AnnouncingLock(), list[int]()

    def watch(engine: Engine) -> Any:
        who.append(threading.get_ident())
        assert lock.is_waited_for.wait(30)
        return step(engine)

    monkeypatch.setattr(llm, "_lock", lock)
    monkeypatch.setattr(Engine, "step", watch)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(getattr(llm, name), prompts[name], GREEDY) for name in prompts]
        assert [one.outputs for future in both for one in future.result(60)] == expected
    assert sum(before != after for before, after in pairwise(who)) == 1, "all steps of the one, then those of the other"
