"""The compiled module, as kernels/cpu/src/binding.cpp makes it. `int` arguments named after tensors are addresses."""

import numpy as np

class Format:
    float32: Format
    bfloat16: Format
    int8: Format
    int4: Format

class KVType:
    float32: KVType
    bfloat16: KVType
    float16: KVType
    fp8_e4m3: KVType
    int8: KVType

class Weight:
    @property
    def num_bytes(self) -> int: ...

class Rows:
    def __init__(
        self,
        first_rows: np.ndarray,
        contexts: np.ndarray,
        first_blocks: np.ndarray,
        block_ids: np.ndarray,
        write_blocks: np.ndarray,
        write_offsets: np.ndarray,
    ) -> None: ...

class Pool:
    def __init__(
        self,
        data: int,
        type: KVType,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        key_scales: int = 0,
        value_scales: int = 0,
    ) -> None: ...

class AttentionOptions:
    def __init__(self, num_heads: int, scale: float, soft_cap: float = 0.0, window: int = 0) -> None: ...

class Layer:
    def __init__(
        self,
        number: int,
        hidden_size: int,
        inner_size: int,
        eps: float,
        input_norm: int,
        post_norm: int,
        qkv: Weight,
        out: Weight,
        gate_up: Weight,
        down: Weight,
        biases: list[int],
        attention: AttentionOptions,
    ) -> None: ...

class Machine:
    def __init__(self, instruction_set: str, num_threads: int) -> None: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def panel_width(self) -> int: ...
    @property
    def has_bfloat16(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    def pack(
        self,
        format: Format,
        num_out: int,
        num_in: int,
        group_size: int,
        is_exact: bool,
        values: int,
        scales: int = 0,
        offsets: int = 0,
    ) -> Weight: ...
    def linear(self, weight: Weight, bias: int, x: int, num_rows: int, out: int, /) -> None: ...
    def rms_norm(self, x: int, weight: int, eps: float, num_rows: int, size: int, out: int, /) -> None: ...
    def add_rms_norm(
        self, x: int, residual: int, weight: int, eps: float, num_rows: int, size: int, out: int, /
    ) -> None: ...
    def rotary(
        self, x: int, row_stride: int, cos: int, sin: int, num_rows: int, num_heads: int, head_dim: int, out: int, /
    ) -> None: ...
    def silu_and_mul(self, x: int, num_rows: int, size: int, out: int, /) -> None: ...
    def write_kv(
        self, key: int, key_stride: int, value: int, value_stride: int, pool: Pool, layer: int, rows: Rows, /
    ) -> None: ...
    def attention(
        self, query: int, query_stride: int, pool: Pool, layer: int, rows: Rows, options: AttentionOptions, out: int, /
    ) -> None: ...
    def top_k(self, x: int, num_rows: int, size: int, k: int, values: int, ids: int, /) -> None: ...
    def read_all(self, data: int, num_floats: int, /) -> float: ...
    def multiply_all(self, format: Format, rounds: int, /) -> int: ...
    def layer(self, layer: Layer, pool: Pool, rows: Rows, cos: int, sin: int, residual: int, /) -> None: ...

def instruction_sets() -> list[str]: ...
def advise_huge_pages(address: int, num_bytes: int, /) -> None: ...
