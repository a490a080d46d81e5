"""Weights of every format: against transformers with the same numbers, and bit for bit against themselves.

The reference is transformers in float32 with the dequantised weights. Where the kernels round activations to int8, it
rounds them too: what is left is the order of sums, and a number now and then that falls to the other side of a half.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from common.checkpoints.gguf_convert import convert_gguf
from common.layers.linear import Linear, WeightForm, stack
from kernels import dispatch
from kernels.cpu import native
from kernels.ops import QuantizedWeight
from kernels.types import quantize
from tests.checkpoints.gguf_files import write_gguf
from tests.models.conftest import Paged, make_tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GGUF: list[Any] = ["Q4_0", "Q4_1", "Q8_0"]
QUANTIZED = ["int8", "int4", *GGUF]
ALL: list[Any] = ["float32", "bfloat16", "float16", *QUANTIZED]
PROMPTS = {
    name: [(i * 37 + salt * 11 + 5) % 128 for i in range(count)]
    for salt, (name, count) in enumerate({"a": 45, "b": 20, "c": 33}.items())
}


@pytest.fixture
def use_kernels() -> Iterator[Callable[..., Any]]:
    yield dispatch.use_cpu_kernels
    dispatch.use_cpu_kernels()


def write(directory: Path, form: Any, *, tied: bool = False, has_biases: bool = False) -> Any:
    """A checkpoint; transformers' model with the numbers that ours has in this form."""
    if form in GGUF:
        file = write_gguf(directory / "tiny.gguf", quantization=GGMLQuantizationType[form], tied=tied)
        convert_gguf(file, directory, progress=False)
        return _untied(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    biases = {"attention_bias": has_biases, "mlp_bias": has_biases}
    reference = _untied(make_tiny(directory, **SHAPE, **biases, tie_word_embeddings=tied))
    if form in ("int8", "int4"):
        for linear in _linears(reference):
            linear.weight.data = quantize(linear.weight.data, form, 0 if form == "int8" else 32).dequantized()
    return reference


def load(directory: Path, form: Any) -> Paged:
    if form in QUANTIZED:
        return Paged(directory, quantization="gguf" if form in GGUF else form)
    return Paged(directory, dtype=form)


def _untied(model: Any) -> Any:
    """The head gets numbers of its own: ours may be quantised where the embedding is not."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def round_to_int8(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Groups of neighbouring inputs share a scale; the last one may be short."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % group_size)).unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    rounded = (groups * (127 / largest)).round() * (largest / 127)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([token_ids])).logits[0])


def prompt_logits(ours: Paged, name: str = "a") -> torch.Tensor:
    return ours.logits([(name, PROMPTS[name], 0, len(PROMPTS[name]))])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("form", QUANTIZED)
def test_exact_activations(use_kernels: Any, tmp_path: Path, form: Any, kernels: str, tied: bool) -> None:
    use_kernels(kernels, is_exact=True)
    reference, ours = write(tmp_path, form, tied=tied), load(tmp_path, form)
    right = logits_of(reference, PROMPTS["a"])
    torch.testing.assert_close(prompt_logits(ours), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("form", QUANTIZED)
def test_activations_rounded_to_int8(use_kernels: Any, tmp_path: Path, form: Any, instruction_set: str) -> None:
    use_kernels(instruction_set)
    reference, ours = write(tmp_path, form), load(tmp_path, form)
    exact = logits_of(reference, PROMPTS["a"])
    group_size = 64 if form == "int8" else 32
    for linear in _linears(reference):
        linear.register_forward_pre_hook(lambda _, args: (round_to_int8(args[0], group_size), *args[1:]))
    rounded = logits_of(reference, PROMPTS["a"])
    got = prompt_logits(ours)
    assert (got - rounded).abs().mean() < 0.02 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("form", ALL)
def test_the_fused_layer_equals_the_ops_one_by_one(
    use_kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    if use_kernels().name == "reference":
        pytest.skip("no compiled kernels here, so no fused layer")
    write(tmp_path, form)
    fused = prompt_logits(load(tmp_path, form))
    monkeypatch.setattr("common.models.llama.ops.fuse_layer", lambda parts: None)
    assert torch.equal(prompt_logits(load(tmp_path, form)), fused)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_matrices_beside_bfloat16(use_kernels: Any, tmp_path: Path, quantization: Any, kernels: str) -> None:
    """Embedding, KV and, in plain torch, activations have 16 bits: as near as bfloat16 alone is."""
    use_kernels(kernels, is_exact=True)
    right = logits_of(write(tmp_path, quantization, has_biases=True), PROMPTS["a"])
    got = prompt_logits(Paged(tmp_path, dtype="bfloat16", quantization=quantization))
    assert 0 < (got - right).abs().mean() < 0.05 * right.std()


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("form", ALL)
def test_native_equals_reference(use_kernels: Any, tmp_path: Path, form: Any, instruction_set: str) -> None:
    """Where the reference computes in 16 bits the compiled kernels are closer to the right numbers than it."""
    right = logits_of(write(tmp_path, form), PROMPTS["a"])
    use_kernels("reference")
    reference = prompt_logits(load(tmp_path, form))
    use_kernels(instruction_set, is_exact=True)
    got = prompt_logits(load(tmp_path, form))
    if form in ("bfloat16", "float16"):
        assert 0 < (got - right).abs().mean() < (reference - right).abs().mean() < 0.05 * right.std()
    else:
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@pytest.mark.parametrize("form", ALL)
def test_a_row_does_not_depend_on_its_batch(use_kernels: Any, tmp_path: Path, form: Any, instruction_set: str) -> None:
    use_kernels(instruction_set)
    write(tmp_path, form)
    ours = load(tmp_path, form)
    right = {name: prompt_logits(ours, name) for name in PROMPTS}
    for chunk in (1, 7, 8, 16, 31):
        pieces = []
        for at in range(0, 45, chunk):
            pieces.append(ours.logits([(f"a{chunk}", PROMPTS["a"], at, min(chunk, 45 - at))]))
        assert torch.equal(torch.cat(pieces), right["a"]), chunk
    for name, tokens in PROMPTS.items():
        ours.logits([(f"{name} mixed", tokens, 0, 12)])
    rows = {"a": (12, 33), "b": (12, 1), "c": (12, 8)}
    got = ours.logits([(f"{name} mixed", PROMPTS[name], first, count) for name, (first, count) in rows.items()])
    assert torch.equal(got, torch.cat([right[name][first : first + count] for name, (first, count) in rows.items()]))


# --- one product of several matrices ---------------------------------------------------------------------------------


def _random(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


def test_parts_of_one_format_stay_quantised() -> None:
    parts = [quantize(_random(rows), "int4", 32) for rows in (8, 4, 12)]
    stacked = stack(parts, torch.float32)
    assert isinstance(stacked, QuantizedWeight)
    assert torch.equal(stacked.dequantized(), torch.cat([part.dequantized() for part in parts]))


@pytest.mark.parametrize(
    "other",
    [
        _random(4),
        quantize(_random(4), "int8", 32),
        quantize(_random(4), "int4", 64),
        QuantizedWeight("int4", torch.ones(4, 64, dtype=torch.uint8), torch.ones(4, 2), None, 32),
    ],
    ids=["float", "format", "group size", "offsets"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_different_formats_become_float(other: Any, dtype: torch.dtype) -> None:
    first = quantize(_random(), "int4", 32)
    floats = other if isinstance(other, torch.Tensor) else other.dequantized()
    for parts, right in (
        ([first, other], [first.dequantized(), floats]),
        ([other, first], [floats, first.dequantized()]),
    ):
        stacked = stack(parts, dtype)
        assert isinstance(stacked, torch.Tensor)
        assert torch.equal(stacked, torch.cat(right).to(dtype))


def test_a_layer_packs_itself_with_its_last_part_whatever_the_order() -> None:
    linear = Linear(64, [8, 4], has_bias=False, form=WeightForm(torch.float32))
    linear.load_weight(_random(4), part=1)
    assert (linear.packed, linear.missing_parts) == (None, [0])
    linear.load_weight(_random(8), part=0)
    assert linear.missing_parts == []
    x = _random(3)
    torch.testing.assert_close(linear(x), x @ torch.cat((_random(8), _random(4))).T)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_what_a_checkpoint_gave_is_let_go_once_it_is_packed(use_kernels: Any, kernels: str, quantization: Any) -> None:
    use_kernels(kernels)
    linear = Linear(64, [8, 4], has_bias=False, form=WeightForm(torch.float32, quantization))
    held = []
    for part, rows in enumerate(linear.out_features):
        weight = _random(rows)
        held.append(weakref.ref(weight))
        linear.load_weight(weight, part)
        del weight
    assert [weight() for weight in held] == [None, None]


@pytest.mark.parametrize(
    ("weight", "quantization", "named"),
    [
        (torch.zeros(8, 63), "none", r"has shape \(8, 63\), must have \(8, 48\)"),
        (quantize(_random(), "int8", 0), "gguf", r"has shape \(8, 64\), must have \(8, 48\)"),
        (torch.full((8, 48), float("nan")), "none", "holds NaN"),
        (torch.zeros(8, 48), "int4", "has 48 inputs, --quantization int4 needs a multiple of 32"),
    ],
)
def test_weights_that_do_not_fit_are_named(weight: Any, quantization: Any, named: str) -> None:
    linear = Linear(48, [8], has_bias=False, form=WeightForm(torch.float32, quantization))
    with pytest.raises(ValueError, match=named):
        linear.load_weight(weight)
