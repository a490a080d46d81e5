"""What a model is computed with: what `auto` means, what is refused, and what tells nodes apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.resolve import resolve_model
from common.config import NodeFlags, parse
from common.engine.build import build_engine
from common.errors import CheckpointError, ConfigError
from common.model_config import load_model_config
from common.runner.factory import Precision, make_layout, resolve_precision, use_kernels
from kernels import dispatch
from kernels.cpu import native
from tests.checkpoints.gguf_files import write_gguf
from tests.models.conftest import make_tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
Resolve = Callable[..., Precision]


@pytest.fixture(autouse=True)
def restore_kernels() -> Iterator[None]:
    yield
    dispatch.use_cpu_kernels()


@pytest.fixture(scope="module")
def gguf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return resolve_model(str(write_gguf(folder / "tiny.gguf")), folder / "cache", progress=False)


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    make_tiny(tmp_path, **SHAPE)
    return tmp_path


def flags_of(*flags: str) -> NodeFlags:
    return parse(NodeFlags, ["--num-threads", "1", *flags])


def resolve(directory: Path, *flags: str) -> Precision:
    use_kernels(flags_of(*flags))
    return resolve_precision(directory, load_model_config(directory), flags_of(*flags))


def say_dtype(directory: Path, **entries: Any) -> None:
    path = directory / "config.json"
    config = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in ("dtype", "torch_dtype")
    }
    path.write_text(json.dumps(config | entries))


@pytest.mark.parametrize(
    ("entries", "is_half"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"torch_dtype": "float16"}, True),
        ({"torch_dtype": "torch.bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("kernels", [*native.instruction_sets(), "reference"])
def test_auto_takes_bfloat16_where_checkpoint_and_processor_have_it(
    tiny_dir: Path, entries: dict[str, str], is_half: bool, kernels: str
) -> None:
    say_dtype(tiny_dir, **entries)
    found = resolve(tiny_dir, "--dtype", "auto", "--cpu-kernels", kernels)
    assert found.dtype == ("bfloat16" if is_half and kernels == "avx512_bf16" else "float32")


def test_the_default_is_float32_whatever_the_checkpoint_has(tiny_dir: Path, gguf_dir: Path) -> None:
    say_dtype(tiny_dir, dtype="bfloat16")
    assert resolve(tiny_dir) == resolve(gguf_dir) == Precision("float32", "none")


def test_auto_keeps_the_bits_of_a_gguf_file_and_quantises_nothing_else(tiny_dir: Path, gguf_dir: Path) -> None:
    assert resolve(gguf_dir, "--quantization", "auto").quantization == "gguf"
    assert resolve(tiny_dir, "--quantization", "auto").quantization == "none"


def test_gguf_for_another_checkpoint_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"--quantization is 'gguf', but {tiny_dir} was not made of a GGUF file; int8"
    ):
        build_engine(tiny_dir, flags_of("--quantization", "gguf"), with_head=True)


def test_kernels_that_are_not_here_are_refused(tiny_dir: Path) -> None:
    missing = next(name for name in ("neon", "avx2") if name not in native.instruction_sets())
    with pytest.raises(ConfigError, match=f"--cpu-kernels is '{missing}': no kernels for '{missing}' here, there are"):
        build_engine(tiny_dir, flags_of("--cpu-kernels", missing), with_head=True)


def test_a_matrix_that_int4_cannot_divide_is_named(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"tensor '.*weight' has 48 inputs, --quantization int4 needs a multiple of 32"
    ):
        build_engine(tmp_path, flags_of("--quantization", "int4"), with_head=True)


@pytest.mark.parametrize(
    ("flags", "kernels", "is_exact"),
    [([], "", False), (["--cpu-kernels", "reference"], "reference", False), (["--exact-activations"], "", True)],
)
def test_flags_reach_the_kernels(tiny_dir: Path, flags: list[str], kernels: str, is_exact: bool) -> None:
    build_engine(tiny_dir, flags_of("--num-gpu-blocks-override", "40", *flags), with_head=True)
    best = next(iter(native.instruction_sets()), "reference")
    assert dispatch.cpu_choice().name == (kernels or best)
    if not kernels and best != "reference":
        assert (native.is_exact(), native.machine().num_threads) == (is_exact, 1)


def test_nodes_with_other_numbers_do_not_exchange_blocks_and_can_say_why(tiny_dir: Path) -> None:
    config = load_model_config(tiny_dir)
    layouts = [
        make_layout(config, 16, dtype, quantization)
        for dtype in ("float32", "bfloat16")
        for quantization in ("none", "int8", "int4", "gguf")
    ]
    assert len({layout.fingerprint for layout in layouts}) == len({layout.describe() for layout in layouts}) == 8
    assert "model_fingerprint" in layouts[5].describe()
    assert f"{config.fingerprint}:bfloat16:int8" in layouts[5].describe()
    assert make_layout(config, 16, "bfloat16", "int8").fingerprint == layouts[5].fingerprint
    exact = [make_layout(config, 16, "float32", form, exact_activations=True) for form in ("none", "int8")]
    assert exact[0].fingerprint == layouts[0].fingerprint  # nothing is rounded there anyway
    assert exact[1].fingerprint not in {layout.fingerprint for layout in layouts}


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
def test_an_engine_says_what_it_serves(gguf_dir: Path, caplog: pytest.LogCaptureFixture, quantization: str) -> None:
    caplog.set_level("INFO")
    parts = build_engine(
        gguf_dir, flags_of("--num-gpu-blocks-override", "40", "--quantization", quantization), with_head=True
    )
    assert parts.layout.model_fingerprint.endswith(f":float32:{quantization}")
    [ready] = [text for text in caplog.messages if text.startswith("engine_ready ")]
    assert f" dtype=float32 quantization={quantization} " in ready
    said = [text for text in caplog.messages if "GGUF" in text]
    assert said == (["matrices of the GGUF file: Q8_0 as int8 15"] if quantization == "gguf" else [])
