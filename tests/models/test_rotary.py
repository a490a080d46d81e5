"""cos and sin tables equal transformers' for every variant (report L-06), and unknown ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.errors import CheckpointError
from common.layers.rotary import RotaryEmbedding, frequencies
from common.model_config import RopeConfig, load_model_config

ORIGINAL = {"original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0, **ORIGINAL},
    "yarn_mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, **ORIGINAL},
    "yarn_betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **ORIGINAL},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "factor": 4.0,
        **ORIGINAL,
    },
}


def config_of(directory: Path, rope: dict[str, Any]) -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        rope_parameters={"rope_theta": 10000.0, **rope},
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    save_file({"weight": torch.zeros(1)}, str(directory / "model.safetensors"))
    return config


@pytest.mark.parametrize("name", VARIANTS)
def test_tables_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = LlamaRotaryEmbedding(config_of(tmp_path, VARIANTS[name]))
    cos, sin = reference(torch.zeros(1), torch.arange(512).unsqueeze(0))
    ours = RotaryEmbedding(load_model_config(tmp_path))
    half = cos.shape[-1] // 2
    torch.testing.assert_close(ours.cos, cos[0, :, :half], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.sin, sin[0, :, :half], rtol=1e-5, atol=1e-5)


def test_theta_is_read_from_the_top_level_too(tmp_path: Path) -> None:
    config_of(tmp_path, {"rope_type": "default"})
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    raw["rope_theta"] = 250000.0
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path).rope.theta == 250000.0


def test_unknown_type_and_missing_key_are_errors() -> None:
    with pytest.raises(CheckpointError, match="'spiral' is not supported"):
        frequencies(RopeConfig(10000.0, "spiral", {}), 16, 512, 512)
    with pytest.raises(CheckpointError, match="'llama3' needs 'factor'"):
        frequencies(
            RopeConfig(10000.0, "llama3", ORIGINAL | {"low_freq_factor": 1, "high_freq_factor": 4}), 16, 512, 512
        )
