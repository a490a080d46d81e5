"""Converted GGUF files against transformers' own GGUF loader, and everything that must be refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from common.checkpoints.gguf_convert import convert_gguf, unpermute
from common.checkpoints.local import check_directory
from common.errors import CheckpointError

MakeGGUF = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "converted"
    path.mkdir()
    return path


def _loaded_by_transformers(gguf: Path) -> torch.nn.Module:
    """What `from_pretrained(gguf_file=...)` does, without the package `accelerate` that it asks for."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits_equal_those_of_transformers_own_loader(
    make_gguf: MakeGGUF, directory: Path, quantization: str, tied: bool
) -> None:
    gguf = make_gguf(quantization=GGMLQuantizationType[quantization], tied=tied)
    convert_gguf(gguf, directory, progress=False)
    check_directory(directory)
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = _loaded_by_transformers(gguf)
    token_ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(ours(token_ids).logits, theirs(token_ids).logits)
    assert ours.config.tie_word_embeddings is tied


def test_tokenizer_and_template_read_as_the_file_says(make_gguf: MakeGGUF, directory: Path) -> None:
    convert_gguf(make_gguf(), directory, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "<|im_start|>hello world 123 é<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.convert_tokens_to_ids("hello") in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (directory / "chat_template.jinja").read_text() == tokenizer.chat_template


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["a", "Ġ1234"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["a", "Ġ", "123", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    make_gguf: MakeGGUF, directory: Path, pre: str, pieces: list[str]
) -> None:
    convert_gguf(make_gguf(pre=pre), directory, progress=False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 1234")] == pieces


def test_llama3_text_starts_with_bos_and_generation_ends_at_both_ends(make_gguf: MakeGGUF, directory: Path) -> None:
    convert_gguf(make_gguf(pre="llama-bpe", eot=0), directory, progress=False)
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("hello").ids[0] == 1
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_llama3_rope_scaling_is_recovered_from_its_divisors(make_gguf: MakeGGUF, directory: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    convert_gguf(make_gguf(rope_divisors=(plain / scaled).numpy()), directory, progress=False)
    found = json.loads((directory / "config.json").read_text())["rope_scaling"]
    assert found == {name: value for name, value in scaling.items() if name != "rope_theta"}


def test_unpermute_undoes_the_permutation_of_llama_cpp() -> None:
    num_heads, half = 3, 4
    rows = np.arange(num_heads * half * 2 * 5, dtype=np.float32).reshape(-1, 5)
    permuted = rows.reshape(num_heads, 2, half, 5).swapaxes(1, 2).reshape(rows.shape)  # convert_hf_to_gguf.py
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, num_heads), rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"tokenizer": "t5"}, "tokenizer 't5'"),
        ({"pre": "no-such-rule"}, "pre-tokenizer 'no-such-rule'"),
        ({"drop": "blk.1.ffn_up.weight"}, "blk.1.ffn_up.weight"),
        ({"drop": "output_norm.weight"}, "output_norm.weight"),
        ({"drop": "token_embd.weight"}, "token_embd.weight"),
        ({"extra": "blk.0.attn_sinks.weight"}, "blk.0.attn_sinks.weight"),
        ({"rope_divisors": np.full(8, 3.0)}, "rope_freqs.weight"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    make_gguf: MakeGGUF, directory: Path, options: dict[str, object], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        convert_gguf(make_gguf(**options), directory, progress=False)


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.01, 0.05, 0.3, 0.9, 0.9999])
def test_a_file_cut_short_anywhere_is_named(make_gguf: MakeGGUF, directory: Path, fraction: float) -> None:
    gguf = make_gguf()
    data = gguf.read_bytes()
    gguf.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is not a whole GGUF file"):
        convert_gguf(gguf, directory, progress=False)


def test_weights_stay_exact(make_gguf: MakeGGUF, directory: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    gguf = make_gguf(quantization=GGMLQuantizationType.Q4_1)
    convert_gguf(gguf, directory, progress=False)
    weights = load_file(directory / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    embedding = tensors["token_embd.weight"]
    assert np.array_equal(weights["model.embed_tokens.weight"], dequantize(embedding.data, embedding.tensor_type))
    assert len(weights) == len(tensors)
