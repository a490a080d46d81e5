"""Prompts and conversations as a Python program gives them, in every form that is understood. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Number
from typing import Any

from common.errors import InvalidRequestError
from common.offline.typed import plain

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of {"prompt": text} and {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]
"""role, content (a text, or a list of {"type": "text", "text": ...}), and what else the model's template reads."""

_PROMPT = "must be a text or a list of token ids"
_CONVERSATION = "must be a list of messages, each a dict with role and content"


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [prompts]
    items = _items(prompts, "prompts", f"{_PROMPT}, or a list of such prompts")
    return [items] if items and isinstance(items[0], Number) else items


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """Raises InvalidRequestError for what is neither, is empty or holds what is no id."""
    value: Any = _only_value(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(value, str):
        return value
    value = value if isinstance(value, Set) else plain(value)  # a set has no order
    if not isinstance(value, list):
        raise InvalidRequestError(f"the prompt is {value!r:.80}, {_PROMPT}", param="prompt")
    if not value:
        raise InvalidRequestError("the prompt is empty, must have at least one token", param="prompt")
    if wrong := [item for item in value if type(item) is not int]:
        raise InvalidRequestError(f"the prompt has {wrong[0]!r:.80} among its token ids, {_PROMPT}", param="prompt")
    return value


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list. No messages at all are no conversation."""
    items = _items(messages, "messages", f"{_CONVERSATION}, or a list of such lists")
    is_one = bool(items) and (isinstance(items[0], str | Mapping) or not isinstance(items[0], Iterable))
    return [items] if is_one else items


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a conversation with contents that are texts. Raises InvalidRequestError naming what is not."""
    items = _items(messages, "messages", _CONVERSATION)
    if not items:
        raise InvalidRequestError(f"messages is empty, {_CONVERSATION}", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(items)]


def _items(value: Any, name: str, wanted: str) -> list[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is {value!r:.80}, {wanted}", param=name)
    return list(value)


def _only_value(prompt: Mapping[str, Any]) -> Any:
    known = {"prompt", "prompt_token_ids"}
    if len(prompt) != 1 or not known.issuperset(prompt):
        raise InvalidRequestError(
            f"a prompt has the keys {list(prompt)!r:.80}, must have one of prompt, prompt_token_ids"
        )
    [value] = prompt.values()
    return value


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{place} is {message!r:.80}, must be a dict with role and content", param="messages")
    if missing := [name for name in ("role", "content") if name not in message]:
        raise InvalidRequestError(f"{place} has no {missing[0]}, must have role and content", param="messages")
    if not isinstance(message["role"], str):
        raise InvalidRequestError(f"{place}.role is {message['role']!r:.80}, must be a text", param="messages")
    return {**message, "content": _content(message["content"], f"{place}.content")}


def _content(content: Any, place: str) -> str:
    """Text parts are joined by line breaks, as the server does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(
            f"{place} is {content!r:.80}, must be a text or a list of text parts", param="messages"
        )
    return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if isinstance(part, Mapping) and part.get("type", "text") != "text":
        shown = f"{place} is of type {part['type']!r:.80}, which is not supported, this model reads text only"
    else:
        shown = f'{place} is {part!r:.80}, must be {{"type": "text", "text": a text}}'
    raise InvalidRequestError(shown, param="messages")
