"""Renders chat messages into a prompt with a model's own Jinja template, in a sandbox.

Follows the conventions of Hugging Face templates: `messages`, `add_generation_prompt`, the special tokens by name,
`raise_exception`, `strftime_now`, a plain `tojson`, loop controls and the `generation` tag. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import CheckpointError, ConfigError, InvalidRequestError
from common.text.tokenizer import read_tokenizer_config


class ChatTemplate:
    """A compiled template. Raises CheckpointError when the source is no valid template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid: line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt; raises InvalidRequestError when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None


def load_chat_template(
    directory: Path, special_tokens: Mapping[str, str], override: str | None = None
) -> ChatTemplate | None:
    """The template of a model directory, or `override` (a file, or the template itself); None when there is none."""
    source = _override_source(override) if override else _directory_source(directory)
    return ChatTemplate(source, special_tokens) if source else None


def _override_source(override: str) -> str:
    if "{" in override:  # no path that anybody uses has one; no template lacks one
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {override!r} cannot be read: {error.strerror}") from None


def _directory_source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_tokenizer_config(directory).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what a model learns from; in a prompt it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which is wrong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
