"""Chat templates: Hugging Face's conventions, in a sandbox, with errors a client can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError, InvalidRequestError
from common.text.chat_template import ChatTemplate, load_chat_template

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def test_renders_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_conventions_of_templates() -> None:
    source = (
        "{{ bos_token }}{%- for m in messages -%}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{%- endfor %}{{ strftime_now('%Y') | length }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<é>"}] * 2)
    assert rendered == '<s>{"role": "user", "content": "<é>"}4'


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(HI)


@pytest.mark.parametrize("attack", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ ''.__class__.x() }}"])
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(attack).render(HI)


def test_a_broken_template_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        ChatTemplate("{% if %}")


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from config"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(tmp_path, {})
    assert found is not None
    assert found.render(HI) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    found = load_chat_template(tmp_path, {})
    assert found is not None
    assert found.render(HI) == "from file"
    found = load_chat_template(tmp_path, {}, "{{ 'inline' }}")
    assert found is not None
    assert found.render(HI) == "inline"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_chat_template(tmp_path, {}, str(tmp_path / "none"))
