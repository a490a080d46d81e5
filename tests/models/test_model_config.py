"""What a model directory says of itself: end tokens, position encoding, missing keys, fingerprint, corrupt files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from common.model_config import load_model_config, weight_files


@pytest.fixture
def directory(tmp_path: Path, write_tiny: Callable[..., Any]) -> Path:
    write_tiny(tmp_path)
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; None takes a key away."""
    values = json.loads(file.read_text()) if file.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not None}
    file.write_text(json.dumps(values))


def test_end_tokens_are_the_union_of_all_sources(directory: Path) -> None:
    """Report L-04: with one source only, the turn-end token was printed and generation ran on."""
    edit(directory / "config.json", eos_token_id=[1])
    edit(directory / "generation_config.json", eos_token_id=[1, 7])
    edit(directory / "tokenizer_config.json", eos_token="<end>", added_tokens_decoder={"9": {"content": "<end>"}})
    assert load_model_config(directory).eos_token_ids == {1, 7, 9}


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}]},
        {"added_tokens": [], "model": {"vocab": {"<end>": 9}}},
    ],
)
def test_the_tokenizers_end_token_is_looked_up_in_its_vocabulary(directory: Path, tokenizer: dict[str, Any]) -> None:
    edit(directory / "tokenizer_config.json", eos_token={"content": "<end>"})
    edit(directory / "tokenizer.json", **tokenizer)
    assert load_model_config(directory).eos_token_ids == {1, 9}


def test_no_end_token_anywhere(directory: Path) -> None:
    edit(directory / "config.json", eos_token_id=None)
    edit(directory / "generation_config.json", eos_token_id=None)
    assert load_model_config(directory).eos_token_ids == frozenset()


def test_an_end_token_that_is_no_id_is_an_error(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id="two")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 'two'"):
        load_model_config(directory)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_parameters": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500000.0, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_theta_is_read_from_either_place(directory: Path, rope: dict[str, Any]) -> None:
    """Report L-07: it fell back to 10,000 in silence."""
    edit(directory / "config.json", **rope)
    config = load_model_config(directory).rope
    assert config.theta == 500000.0
    assert (config.type, config.parameters) in [("default", {}), ("linear", {"factor": 2.0})]


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "architectures",
    ],
)
def test_a_missing_key_is_named(directory: Path, key: str) -> None:
    edit(directory / "config.json", **{key: None})
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is "):
        load_model_config(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "original_max_position_embeddings is missing",
        ),
        ({"rope_parameters": {"full": {"rope_theta": 1e4}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
    ],
)
def test_a_wrong_value_is_named(directory: Path, changes: dict[str, Any], message: str) -> None:
    edit(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(directory)


def test_defaults_that_follow_from_other_keys(directory: Path) -> None:
    edit(directory / "config.json", num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    config = load_model_config(directory)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (6, 8, False)


def test_fingerprint_tells_rope_weights_and_precision_apart_and_nothing_else(directory: Path) -> None:
    first = load_model_config(directory).fingerprint
    edit(directory / "generation_config.json", eos_token_id=5, temperature=0.1)
    assert load_model_config(directory).fingerprint == first
    edit(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    other_rope = load_model_config(directory).fingerprint
    tensors = load_file(str(directory / "model.safetensors"))
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, str(directory / "model.safetensors"))
    other_weights = load_model_config(directory).fingerprint
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, str(directory / "model.safetensors"))
    other_precision = load_model_config(directory).fingerprint
    assert len({first, other_rope, other_weights, other_precision}) == 4


@pytest.mark.parametrize("keep", [0, 5, 100, -100])
def test_a_file_cut_short_is_named(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (cut short or )?corrupt"):
        load_model_config(directory)


def test_an_index_must_not_reach_outside_the_model(directory: Path) -> None:
    edit(directory / "model.safetensors.index.json", weight_map={"model.norm.weight": "../other.safetensors"})
    with pytest.raises(CheckpointError, match="which is not in"):
        weight_files(directory)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_config_that_is_no_json_object(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(directory)


def test_a_directory_without_config_or_weights(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_model_config(tmp_path / "nowhere")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        load_model_config(directory)
