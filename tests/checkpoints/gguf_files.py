"""Tiny synthetic GGUF files of the Llama architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(hidden))]


TOKENS = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "Ġw"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]


def _block_bytes(rng: np.random.Generator, shape: tuple[int, int], kind: GGMLQuantizationType) -> Any:
    """Any bits that a block can have: every integer, and scales of both signs from subnormal to large."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // size, num_bytes), np.uint8)
    num_floats = 2 if kind == GGMLQuantizationType.Q4_1 else 1
    magnitudes = 10.0 ** rng.uniform(-7.5, -1.5, (*blocks.shape[:2], num_floats))
    signs = rng.choice([-1, 1], magnitudes.shape)
    blocks[:, :, : 2 * num_floats] = (signs * magnitudes).astype("<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _tensors(
    quantization: GGMLQuantizationType,
    tied: bool,
    seed: int,
    types: Mapping[str, GGMLQuantizationType],
    has_any_bits: bool,
) -> dict[str, tuple[Any, GGMLQuantizationType]]:
    rng = np.random.default_rng(seed)
    kv_size = KV_HEADS * HIDDEN // HEADS
    tensors: dict[str, tuple[Any, GGMLQuantizationType]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = types.get(name, quantization)
        if has_any_bits:
            tensors[f"{name}.weight"] = _block_bytes(rng, (rows, columns), kind), kind
        else:
            values = rng.normal(0, 0.2, (rows, columns)).astype(np.float32)
            tensors[f"{name}.weight"] = quantize(values, kind), kind

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = rng.normal(1, 0.1, HIDDEN).astype(np.float32), GGMLQuantizationType.F32

    matrix("token_embd", len(TOKENS), HIDDEN)
    norm("output_norm")
    if not tied:
        matrix("output", len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        matrix(f"blk.{i}.attn_q", HIDDEN, HIDDEN)
        matrix(f"blk.{i}.attn_k", kv_size, HIDDEN)
        matrix(f"blk.{i}.attn_v", kv_size, HIDDEN)
        matrix(f"blk.{i}.attn_output", HIDDEN, HIDDEN)
        matrix(f"blk.{i}.ffn_gate", INTERMEDIATE, HIDDEN)
        matrix(f"blk.{i}.ffn_up", INTERMEDIATE, HIDDEN)
        matrix(f"blk.{i}.ffn_down", HIDDEN, INTERMEDIATE)
    return tensors


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    tied: bool = True,
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    rope_divisors: Any = None,
    drop: str | None = None,
    extra: str | None = None,
    eot: int | None = None,
    seed: int = 0,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    has_any_bits: bool = False,
) -> Path:
    """types: by name (blk.0.attn_q) of those that have another type. has_any_bits: blocks of random bits instead of
    quantised numbers."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if eot is not None:
        writer.add_eot_token_id(eot)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tensors = _tensors(quantization, tied, seed, types or {}, has_any_bits)
    if rope_divisors is not None:
        tensors["rope_freqs.weight"] = (np.asarray(rope_divisors, np.float32), GGMLQuantizationType.F32)
    if extra is not None:
        tensors[extra] = (np.zeros(HIDDEN, np.float32), GGMLQuantizationType.F32)
    tensors.pop(drop, None)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
