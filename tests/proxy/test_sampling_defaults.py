"""What a request leaves out comes from the model's generation_config.json; what it says wins; a flag turns it off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from common import messages as m
from common.checkpoints.sampling_defaults import SamplingDefaults, load_sampling_defaults
from common.errors import CheckpointError

EOS = 2
FILE = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def load(directory: Path, **values: Any) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return load_sampling_defaults(directory)


def test_reads_what_the_file_says(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    others = {"eos_token_id": [1, 2], "do_sample": False, "transformers_version": "4.51.0", "top_h": 3}
    assert load(tmp_path, **FILE, **others, max_new_tokens=64) == SamplingDefaults(FILE, 64)
    assert load(tmp_path, **others, temperature=None, max_new_tokens=None) == SamplingDefaults()
    assert load(tmp_path, top_k=50, temperature=1.0).values == {"top_k": 50, "temperature": 1.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"temperature": math.nan}, "temperature is nan, must be from 0"),
        ({"temperature": -1}, "temperature is -1, must be from 0"),
        ({"top_k": 2.5}, "top_k is 2.5, must be an integer"),
        ({"top_k": True}, "top_k is True, must be an integer"),
        ({"top_p": 0}, "top_p is 0, must be above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, must be from 1"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_the_way_out(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, **values)
    assert f"generation_config.json: {words}" in error.value.message
    assert "--generation-config vllm" in error.value.message


def sampled(params: Any) -> dict[str, float]:
    return {name: getattr(params, name) for name in NEUTRAL}


async def params_of(proxy: Any, node: Any, path: str, **body: Any) -> Any:
    count = node.count(m.Decode)
    await (proxy.chat(**body) if path == "chat" else proxy.complete(**body))
    return (await node.expect(m.Decode, count + 1)).params


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_explicit_values_win_and_null_is_the_default(start_proxy: Any, path: str) -> None:
    proxy = await start_proxy(sampling_defaults=SamplingDefaults(FILE))
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert sampled(await params_of(proxy, node, path)) == FILE
    assert sampled(await params_of(proxy, node, path, **dict.fromkeys(FILE))) == FILE
    assert sampled(await params_of(proxy, node, path, **NEUTRAL)) == NEUTRAL
    assert sampled(await params_of(proxy, node, path, temperature=0, top_k=-1)) == {
        **FILE,
        "temperature": 0,
        "top_k": -1,
    }


async def test_without_a_file_the_values_are_neutral(proxy: Any) -> None:
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert sampled(await params_of(proxy, node, "chat")) == NEUTRAL


async def test_beams_take_the_length_only(start_proxy: Any) -> None:
    proxy = await start_proxy(sampling_defaults=SamplingDefaults(FILE, 40))
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    params = await params_of(proxy, node, "chat", use_beam_search=True)
    assert (sampled(params), params.max_tokens) == (NEUTRAL, 40)


async def test_max_new_tokens_is_a_chat_answers_default(start_proxy: Any) -> None:
    """Completions have OpenAI's own default of 16; what a request says may be more than the model's file has."""
    proxy = await start_proxy(sampling_defaults=SamplingDefaults(max_tokens=40))
    node = await proxy.node(lambda _: [*proxy.ids("Hello"), [EOS]])
    assert (await params_of(proxy, node, "chat")).max_tokens == 40
    assert (await params_of(proxy, node, "chat", max_tokens=None, max_completion_tokens=None)).max_tokens == 40
    assert (await params_of(proxy, node, "chat", max_completion_tokens=50)).max_tokens == 50
    assert (await params_of(proxy, node, "completions", max_tokens=None)).max_tokens == 16
    messages = [{"role": "user", "content": "x " * 1000}]
    near_the_end = await params_of(proxy, node, "chat", messages=messages)
    decode = await node.expect(m.Decode, node.count(m.Decode))
    assert near_the_end.max_tokens == min(40, 2048 - len(decode.prompt_token_ids)) < 40
