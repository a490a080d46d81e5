"""The 4 and 8 bits of a GGUF file, kept: as numbers they are those of the float32 file, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from common.checkpoints.gguf_convert import convert_gguf
from common.checkpoints.gguf_quantized import QUANTIZED_FILE
from common.checkpoints.manifest import find_damage
from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL
from common.errors import CheckpointError
from common.models.gguf_weights import GGUFWeights, has_gguf_weights
from kernels.types import QuantizedWeight

MakeGGUF = Callable[..., Path]


def check_all(directory: Path) -> dict[str, QuantizedWeight]:
    """Every matrix that is kept, after comparison; those that are not are no matrices."""
    floats = load_file(str(directory / "model.safetensors"))
    with GGUFWeights(directory) as gguf:
        found = {name: gguf.get(name) for name in floats}
    kept = {name: weight for name, weight in found.items() if weight is not None}
    for name, weight in kept.items():
        same = weight.dequantized().view(torch.int32) == floats[name].view(torch.int32)
        assert bool(same.all()), name
    assert {name for name in floats if name not in kept} == {name for name in floats if floats[name].dim() < 2}
    return kept


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_any_bits", [True, False])
@pytest.mark.parametrize(("kind", "form"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")])
def test_kept_bits_are_the_float_weights(
    make_gguf: MakeGGUF, tmp_path: Path, kind: str, form: str, has_any_bits: bool, tied: bool
) -> None:
    gguf = make_gguf(quantization=GGMLQuantizationType[kind], tied=tied, has_any_bits=has_any_bits)
    directory = tmp_path / "converted"
    directory.mkdir()
    convert_gguf(gguf, directory, progress=False)
    kept = check_all(directory)
    assert len(kept) == 1 + 2 * 7 + (not tied)
    assert {(weight.format, weight.group_size) for weight in kept.values()} == {(form, 32)}
    assert {weight.offsets is not None for weight in kept.values()} == {kind == "Q4_1"}
    if has_any_bits:  # the whole range is there
        q = torch.cat([weight.q.flatten() for weight in kept.values()])
        assert sorted(q.unique().tolist()) == list(range(16 if form == "int4" else 256))


def test_the_real_model_is_kept_bit_for_bit() -> None:
    kept = check_all(resolve_model(DEFAULT_MODEL))
    assert sorted({weight.format for weight in kept.values()}) == ["int4", "int8"]
    assert len(kept) == 30 * 7 + 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_file_of_floats_keeps_nothing_and_says_what_it_has(make_gguf: MakeGGUF, tmp_path: Path, kind: str) -> None:
    directory = resolve_model(str(make_gguf(quantization=GGMLQuantizationType[kind])), tmp_path / "cache", False)
    name = "model.layers.1.mlp.up_proj.weight"
    assert has_gguf_weights(directory)
    with GGUFWeights(directory) as gguf:
        assert gguf.get(name) is None
        assert gguf.describe({name: "bfloat16"}) == f"{kind} as bfloat16 1"


def test_kept_bits_that_were_cut_short_are_named_and_made_again(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    gguf, cache = str(make_gguf()), tmp_path / "cache"
    directory = resolve_model(gguf, cache, progress=False)
    file = directory / QUANTIZED_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert find_damage(directory) == f"{file} has {len(whole) - 1} bytes, must have {len(whole)}"
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        GGUFWeights(directory)
    assert resolve_model(gguf, cache, progress=False) == directory
    assert file.read_bytes() == whole


def test_a_tensor_that_is_not_there_is_named(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    directory = resolve_model(str(make_gguf()), tmp_path / "cache", progress=False)
    file = directory / QUANTIZED_FILE
    file.write_bytes(
        file.read_bytes().replace(b"layers.1.mlp.up_proj.weight.scales", b"layers.1.mlp.up_proj.weight.scaled")
    )
    with (
        GGUFWeights(directory) as gguf,
        pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' cannot"),
    ):
        gguf.get("model.layers.1.mlp.up_proj.weight")
