"""The loader fills everything, uses everything, or says what is wrong (reports L-02, L-09)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from common.layers.linear import WeightForm
from common.model_config import load_model_config
from common.models.llama import Llama
from common.models.loader import load_model


def load(directory: Path, *, has_head: bool = True) -> Llama:
    return load_model(directory, load_model_config(directory), WeightForm(torch.float32), has_head=has_head)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(str(file))
    edit(tensors)
    save_file(tensors, str(file), metadata={"format": "pt"})


def head_logits(model: Llama) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(torch.eye(48)[:5])


def test_tied_without_head(tmp_path: Path, write_tiny: Any) -> None:
    reference = write_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(str(tmp_path / "model.safetensors"))
    right = torch.eye(48)[:5] @ reference.model.embed_tokens.weight.T
    torch.testing.assert_close(head_logits(load(tmp_path)), right, rtol=1e-4, atol=1e-4)


def test_tied_with_a_redundant_head(tmp_path: Path, write_tiny: Any) -> None:
    reference = write_tiny(tmp_path, tie_word_embeddings=True)
    weight = reference.model.embed_tokens.weight.detach()
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": weight.clone()}))
    torch.testing.assert_close(head_logits(load(tmp_path)), torch.eye(48)[:5] @ weight.T, rtol=1e-4, atol=1e-4)


def test_untied_with_head(tmp_path: Path, write_tiny: Any) -> None:
    reference = write_tiny(tmp_path, tie_word_embeddings=False)
    right = torch.eye(48)[:5] @ reference.lm_head.weight.T
    torch.testing.assert_close(head_logits(load(tmp_path)), right, rtol=1e-4, atol=1e-4)


def test_untied_without_head_is_an_error_unless_no_head_is_wanted(tmp_path: Path, write_tiny: Any) -> None:
    write_tiny(tmp_path, tie_word_embeddings=False)
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"no weights for lm_head\.weight"):
        load(tmp_path)
    assert load(tmp_path, has_head=False).head is None


def test_missing_tensor_is_named(tmp_path: Path, write_tiny: Any) -> None:
    write_tiny(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"no weights for model\.layers\.1\.self_attn\.k_proj\.weight \(1 "):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.2.post_attention_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_every_kind_of_missing_tensor_is_named_once(tmp_path: Path, write_tiny: Any, name: str) -> None:
    write_tiny(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    change(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"no weights for {re.escape(name)} \(1 in all\)"):
        load(tmp_path)


def test_tensor_that_does_not_belong_is_named(tmp_path: Path, write_tiny: Any) -> None:
    write_tiny(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    change(tmp_path, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_tensor_of_a_wrong_shape_is_named(tmp_path: Path, write_tiny: Any) -> None:
    write_tiny(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(47,\), must have \(48,\)"):
        load(tmp_path)


def test_truncated_file_is_named(tmp_path: Path, write_tiny: Any) -> None:
    write_tiny(tmp_path)
    config = load_model_config(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(tmp_path, config, WeightForm(torch.float32), has_head=True)


def test_shards_named_by_an_index(tmp_path: Path, write_tiny: Any) -> None:
    reference = write_tiny(tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, str(tmp_path / file), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    right = torch.eye(48)[:5] @ reference.lm_head.weight.T
    torch.testing.assert_close(head_logits(load(tmp_path)), right, rtol=1e-4, atol=1e-4)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing, .*index\.json names it"):
        load(tmp_path)


def test_transformers_does_not_take_our_kernels_for_the_other_package() -> None:
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()
