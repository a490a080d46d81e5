"""The official client and plain curl-like HTTP, one and many at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def sdk(split: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{split.service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(sdk: openai.OpenAI) -> str:
    return sdk.models.list().data[0].id


def test_chat(sdk: openai.OpenAI, model: str) -> None:
    reply = sdk.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 37


def test_chat_streamed_equals_unstreamed(sdk: openai.OpenAI, model: str) -> None:
    whole = sdk.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    parts = sdk.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert text == whole.choices[0].message.content


def test_completion_streamed_with_usage(sdk: openai.OpenAI, model: str) -> None:
    parts = list(
        sdk.completions.create(
            model=model,
            prompt="1, 2, 3,",
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 12
    assert "".join(p.choices[0].text for p in parts[:-1]).startswith(" 4")


def test_thirty_two_at_once(split: Any, cases: dict[str, Any], together: Any) -> None:
    case = cases["text_json"]
    together(*[lambda: split.check_case(case) for _ in range(32)])
    split.assert_pools_idle()
