"""GGUF file of the Llama architecture -> Hugging Face directory (float32 safetensors, config, tokenizer, template).

Weights are stored as float32, which holds every dequantised value exactly, and once more in the file's own 4 or 8 bits
(gguf_quantized.py). Knows Llama's tensor names and metadata; knows nothing of caches or where the file came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from common.checkpoints.gguf_file import GGUFFile
from common.checkpoints.gguf_quantized import quantized_specs, write_quantized
from common.checkpoints.gguf_tokenizer import special_token_id, tokenizer_config, tokenizer_json
from common.checkpoints.safetensors_writer import TensorSpec, num_data_bytes, write_safetensors
from common.errors import CheckpointError

CONVERTER_VERSION = 2
"""Raised whenever the output changes, so that caches convert anew."""

_Number = TypeVar("_Number", bound=np.generic)

_ROPE_FACTORS = "rope_freqs.weight"
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEEDED_IN_BLOCK = tuple(f"{name}.weight" for name in _IN_BLOCK)


def convert_gguf(path: Path, directory: Path, *, progress: bool = True) -> None:
    """Writes the files of a Hugging Face checkpoint into `directory`, which exists.

    Raises CheckpointError when the file is damaged, or is of an architecture, tokenizer or tensor type not supported.
    """
    gguf = GGUFFile(path)
    _check_supported(gguf)
    config = llama_config(gguf)
    _write_json(directory / "tokenizer.json", tokenizer_json(gguf), indent=None)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(gguf, config["max_position_embeddings"]))
    if template := gguf.get("tokenizer.chat_template", None):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(directory / "generation_config.json", _generation_config(gguf))
    _write_weights(gguf, config, directory, progress)
    _write_json(directory / "config.json", config)


def llama_config(gguf: GGUFFile) -> dict[str, Any]:
    """What transformers' LlamaConfig needs, read from the metadata and the tensors that are there."""
    hidden_size, num_heads = gguf.require("llama.embedding_length"), gguf.require("llama.attention.head_count")
    names = set(gguf.tensor_names)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.require("llama.feed_forward_length"),
        "num_hidden_layers": gguf.require("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", num_heads),
        "head_dim": gguf.get("llama.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": gguf.require("llama.context_length"),
        "rms_norm_eps": _shortest(gguf.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(gguf.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(gguf),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        **{f"{name}_token_id": special_token_id(gguf, name) for name in ("bos", "eos", "pad")},
    }


def unpermute(values: npt.NDArray[_Number], num_heads: int) -> npt.NDArray[_Number]:
    """Rows of a Q or K projection from llama.cpp's order to Hugging Face's.

    llama.cpp rotates the neighbouring rows 2i and 2i+1 of a head together, Hugging Face rows i and i + head_dim/2.
    values: [num_heads * head_dim, ...].
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _check_supported(gguf: GGUFFile) -> None:
    if (architecture := gguf.require("general.architecture")) != "llama":
        raise CheckpointError(f"{gguf.path}: architecture {architecture!r} is not supported, only 'llama' is")
    if (num_experts := gguf.get("llama.expert_count", 0)) > 0:
        raise CheckpointError(f"{gguf.path}: a mixture of {num_experts} experts is not supported")
    if (num_files := gguf.get("split.count", 1)) > 1:
        raise CheckpointError(f"{gguf.path} is one of {num_files} parts; merge them with llama-gguf-split first")
    if "token_embd.weight" not in gguf.tensor_names:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing")
    head_dim = gguf.require("llama.embedding_length") // gguf.require("llama.attention.head_count")
    head_dim = gguf.get("llama.attention.key_length", head_dim)
    if (rotated := gguf.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(f"{gguf.path}: rotating {rotated} of {head_dim} dimensions of a head is not supported")


def _rope_scaling(gguf: GGUFFile) -> dict[str, Any] | None:
    if _ROPE_FACTORS in gguf.tensor_names:
        return _llama3_scaling(gguf)
    kind = gguf.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": gguf.require("llama.rope.scaling.factor")}
    raise CheckpointError(
        f"{gguf.path}: RoPE scaling {kind!r} is not supported, only 'none', 'linear' and Llama 3's are"
    )


def _llama3_scaling(gguf: GGUFFile) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF stores only as the finished divisor of each frequency; checked against them."""
    divisors = gguf.tensor(_ROPE_FACTORS)
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(scaling, gguf.get("llama.rope.freq_base", 10000.0), len(divisors))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(f"{gguf.path}: {_ROPE_FACTORS} is not the scaling of Llama 3.1 to 3.3")
    return scaling


def _llama3_divisors(scaling: dict[str, Any], theta: float, num_frequencies: int) -> npt.NDArray[np.float64]:
    wavelengths = 2 * np.pi * theta ** (np.arange(num_frequencies) / num_frequencies)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors


def _generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """Generation ends at the end of the text and at the end of a turn, where the file tells the two apart."""
    ends = [special_token_id(gguf, name) for name in ("eos", "eot")]
    unique = sorted({token_id for token_id in ends if token_id is not None})
    config = {
        "bos_token_id": special_token_id(gguf, "bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": special_token_id(gguf, "pad"),
    }
    return {name: value for name, value in config.items() if value is not None}


def _write_weights(gguf: GGUFFile, config: dict[str, Any], directory: Path, progress: bool) -> None:
    sources = dict(_renamed(gguf, config["num_hidden_layers"]))
    specs = {name: TensorSpec(gguf.shape(source)) for name, source in sources.items()}
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def reordered(name: str, rows: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        heads = num_heads.get(name.split(".")[-2])
        return rows if heads is None else unpermute(rows, heads)

    total = num_data_bytes(specs) + num_data_bytes(quantized_specs(gguf, sources))
    with tqdm(
        total=total, desc=f"Converting {gguf.path.name}", unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:
        write_safetensors(
            directory / "model.safetensors",
            specs,
            lambda name: reordered(name, gguf.tensor(sources[name])),
            bar.update,
        )
        write_quantized(gguf, sources, directory, reordered, bar.update)


def _renamed(gguf: GGUFFile, num_layers: int) -> Iterator[tuple[str, str]]:
    """(Hugging Face name, GGUF name) of every tensor. Raises CheckpointError for one too many or too few."""
    names = set(gguf.tensor_names)
    needed = {"output_norm.weight"} | {f"blk.{i}.{name}" for i in range(num_layers) for name in _NEEDED_IN_BLOCK}
    if missing := sorted(needed - names):
        raise CheckpointError(f"{gguf.path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for source in gguf.tensor_names:
        if source != _ROPE_FACTORS:
            yield _hugging_face_name(gguf, source, num_layers), source


def _hugging_face_name(gguf: GGUFFile, source: str, num_layers: int) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", source):
        layer, name, kind = int(match[1]), match[2], match[3]
        if name in _IN_BLOCK and layer < num_layers:
            return f"model.layers.{layer}.{_IN_BLOCK[name]}.{kind}"
    if (match := re.fullmatch(r"(\w+)\.weight", source)) and match[1] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[match[1]]}.weight"
    raise CheckpointError(f"{gguf.path}: tensor {source} has no place in a Llama model of {num_layers} layers")


def _shortest(value: float) -> float:
    """The decimal number a float32 was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
