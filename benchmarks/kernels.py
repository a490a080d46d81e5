"""Each CPU kernel against what this core can do at best, in one run.

    python -m benchmarks.kernels [--only linear,attention] [--instruction-set avx2]

First the ceilings, measured the same way: reading a large piece of memory, and multiplying what is in registers. Then
each op's rate and its part of its ceiling: one row and decode attention of the reading rate, many rows of the
multiplying rate. Times are this thread's CPU time, so that what else the machine does counts for less.
Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.engine_report import Check, Section, describe_machine, names_among
from kernels import dispatch, ops
from kernels.cpu import _native, native
from kernels.plan import AttentionPlan, AttentionShape, make_plan
from kernels.types import WeightFormat, quantize

SHAPES = ((3072, 576), (576, 1536))  # (out, in): the largest products of the default model
READ_BYTES = 512 << 20
MANY_ROWS = 256
ONE_ROW_TARGETS = {"float32": 0.92, "bfloat16": 0.92, "int8": 0.70, "int4": 0.55}
ATTENTION_TARGETS = {"float32": 0.85, "bfloat16": 0.85, "fp8": 0.50, "int8": 0.50}
MANY_ROWS_TARGET = 0.80
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class Ceilings:
    """read: bytes/s of one core. multiply: operations/s by weight format."""

    def __init__(self) -> None:
        machine = native.machine()
        memory = torch.empty(READ_BYTES // 4)
        ops.want_huge_pages(memory)
        memory.fill_(1.0)
        self.read = READ_BYTES / best(lambda: machine.read_all(memory.data_ptr(), memory.numel()))
        self.multiply = {name: self._multiply(name) for name in ("float32", "bfloat16", "int8")}
        self.multiply["int4"] = self.multiply["int8"]

    @staticmethod
    def _multiply(name: str) -> float:
        machine, form = native.machine(), getattr(_native.Format, name)
        count = machine.multiply_all(form, 1)
        rounds = 2_000_000
        return count * rounds / best(lambda: machine.multiply_all(form, rounds))


def best(run: Callable[[], Any], repeats: int = 7) -> float:
    """Seconds of this thread's CPU; the least of several, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


# --- products --------------------------------------------------------------------------------------------------------

FORMS = (("float32", 0), ("bfloat16", 0), ("int8", 0), ("int8", 32), ("int4", 32), ("int4", 64))


def measure_linear(ceilings: Ceilings) -> Section:
    rows, checks = [], []
    for name, group_size in FORMS:
        for num_out, num_in in SHAPES:
            one, many, torchs = _measure_product(name, group_size, num_out, num_in)
            label = f"{name}{f' in groups of {group_size}' if group_size else ''}, {num_in} to {num_out}"
            of_float32 = many / ceilings.multiply["float32"]
            rows.append(
                [
                    label,
                    f"{one / 1e9:.1f}",
                    f"{one / ceilings.read:.0%}",
                    f"{many / 1e9:.0f}",
                    f"{of_float32:.0%}",
                    f"{many / ceilings.multiply[name]:.0%}",
                    f"{many / torchs:.2f}",
                ]
            )
            checks += [
                Check(f"{label}, one row, of reading", one / ceilings.read, ONE_ROW_TARGETS[name], ""),
                Check(f"{label}, many rows, of float32's multiplying", of_float32, MANY_ROWS_TARGET, ""),
                Check(f"{label}, many rows, of torch", many / torchs, 1.0, "x"),
            ]
    return Section(
        "matrix products, one core",
        f"one row: GB/s of weights and its part of reading; {MANY_ROWS} rows: GFLOP/s, its part of float32's and of the"
        " format's own multiplying, and times torch's (in float32 for int8 and int4)",
        ["weight", "GB/s", "of reading", "GFLOP/s", "of float32", "of its own", "x torch"],
        rows,
        checks=checks,
    )


def _measure_product(name: str, group_size: int, num_out: int, num_in: int) -> tuple[float, float, float]:
    """Bytes/s of one row; operations/s of many rows, and torch's."""
    weight = torch.randn(num_out, num_in)
    packed = _packed(weight, name, group_size)
    copies = [packed, *(_packed(weight, name, group_size) for _ in range(READ_BYTES // 2 // packed.num_bytes))]
    x = torch.randn(MANY_ROWS, num_in)
    num_bytes, num_ops = sum(copy.num_bytes for copy in copies), 2 * MANY_ROWS * num_out * num_in
    one = num_bytes / best(lambda: [ops.linear(x[:1], copy) for copy in copies], 5)
    many = num_ops / best(lambda: ops.linear(x, packed))
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    by_torch = weight.to(dtype), x.to(dtype)
    return one, many, num_ops / best(lambda: torch.nn.functional.linear(by_torch[1], by_torch[0]))


def _packed(weight: torch.Tensor, name: str, group_size: int) -> ops.PackedWeight:
    if name in ("int8", "int4"):
        form: WeightFormat = "int8" if name == "int8" else "int4"
        return ops.pack_weight(quantize(weight, form, group_size))
    return ops.pack_weight(weight.to(getattr(torch, name)))


# --- attention -------------------------------------------------------------------------------------------------------

NUM_SEQUENCES, CONTEXT, PROMPT = 64, 1024, 512


def measure_attention(ceilings: Ceilings) -> Section:
    rows, checks = [], []
    for num_heads, num_kv_heads, head_dim in ((9, 3, 64), (32, 8, 128)):
        for name, dtype in KV_DTYPES.items():
            shape = AttentionShape(1, num_heads, num_kv_heads, 16, head_dim, dtype)
            decode, prefill = _measure_decode(shape), _measure_prefill(shape)
            label = f"{name}, {num_heads} heads over {num_kv_heads} of {head_dim}"
            rows.append(
                [
                    label,
                    f"{decode / 1e9:.1f}",
                    f"{decode / ceilings.read:.0%}",
                    f"{prefill / 1e9:.0f}",
                    f"{prefill / ceilings.multiply['float32']:.0%}",
                ]
            )
            checks.append(Check(f"{label}, decode, of reading", decode / ceilings.read, ATTENTION_TARGETS[name], ""))
    return Section(
        "attention, one core",
        f"decode: {NUM_SEQUENCES} sequences of {CONTEXT}, blocks of 16 in random order, GB/s of KV;"
        f" prefill: a prompt of {PROMPT}, GFLOP/s; each with its part of the ceiling",
        ["KV", "GB/s", "of reading", "GFLOP/s", "of float32"],
        rows,
        checks=checks,
    )


def _pool(shape: AttentionShape, num_blocks: int) -> torch.Tensor:
    size = (num_blocks, 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = torch.empty(size, dtype=shape.dtype)
    ops.want_huge_pages(pool)
    pool.view(torch.uint8).zero_()
    return pool


def _plan(shape: AttentionShape, rows: list[int], contexts: list[int]) -> AttentionPlan:
    """Blocks in random order, as they are after a while of serving."""
    num_blocks = [-(-context // shape.block_size) for context in contexts]
    ids = np.random.default_rng(0).permutation(sum(num_blocks)) + 1
    tables = [table.tolist() for table in np.split(ids, np.cumsum(num_blocks)[:-1])]
    nowhere = np.zeros(sum(rows), np.int32)
    return make_plan(shape, rows, contexts, tables, nowhere, nowhere)


def _measure_decode(shape: AttentionShape) -> float:
    """Bytes of KV a second."""
    plan = _plan(shape, [1] * NUM_SEQUENCES, [CONTEXT] * NUM_SEQUENCES)
    pool = _pool(shape, len(plan.block_ids) + 1)
    num_bytes = NUM_SEQUENCES * CONTEXT * 2 * shape.num_kv_heads * shape.head_dim * pool.element_size()
    return num_bytes / best(lambda: _attend(shape, pool, plan))


def _measure_prefill(shape: AttentionShape) -> float:
    """Operations a second; what the causal mask hides is not counted."""
    plan = _plan(shape, [PROMPT], [PROMPT])
    pool = _pool(shape, len(plan.block_ids) + 1)
    num_ops = 4 * PROMPT * (PROMPT + 1) / 2 * shape.num_heads * shape.head_dim
    return num_ops / best(lambda: _attend(shape, pool, plan))


def _attend(shape: AttentionShape, pool: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    q = torch.ones(plan.num_rows, shape.num_heads, shape.head_dim)
    return ops.paged_attention(q, pool, 0, plan, ops.AttentionOptions(shape.head_dim**-0.5))


# --- the rest --------------------------------------------------------------------------------------------------------


def measure_small(_ceilings: Ceilings) -> Section:
    ours = _small_seconds()
    chosen = dispatch.cpu_choice().name
    dispatch.use_cpu_kernels(dispatch.REFERENCE)
    torchs = _small_seconds()
    dispatch.use_cpu_kernels(chosen)
    rows = [
        [name, *(f"{seconds * 1e6:.1f}" for pair in zip(ours[name], torchs[name], strict=True) for seconds in pair)]
        for name in ours
    ]
    return Section(
        "row by row, one core",
        f"microseconds of 1 row and of {MANY_ROWS}, at the default model's sizes",
        ["op", "1 row", "torch's", f"{MANY_ROWS} rows", "torch's"],
        rows,
    )


def _small_seconds() -> dict[str, list[float]]:
    weight, cos, logits = torch.randn(576), torch.randn(MANY_ROWS, 64), torch.randn(MANY_ROWS, 49152)
    rows, heads, wide = torch.randn(MANY_ROWS, 576), torch.randn(MANY_ROWS, 12, 64), torch.randn(MANY_ROWS, 3072)
    cases: dict[str, Callable[[int], object]] = {
        "rms_norm": lambda n: ops.rms_norm(rows[:n], weight, 1e-5),
        "fused_add_rms_norm": lambda n: ops.fused_add_rms_norm(rows[:n], rows[:n], weight, 1e-5),
        "rotary_embedding": lambda n: ops.rotary_embedding(heads[:n], cos[:n], cos[:n]),
        "silu_and_mul": lambda n: ops.silu_and_mul(wide[:n]),
        "top_k of 20": lambda n: ops.top_k(logits[:n], 20),
    }
    return {name: [best(partial(run, num_rows)) for num_rows in (1, MANY_ROWS)] for name, run in cases.items()}


MEASUREMENTS: dict[str, Callable[[Ceilings], Section]] = {
    "linear": measure_linear,
    "attention": measure_attention,
    "small": measure_small,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_among(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--instruction-set", default=dispatch.AUTO, choices=[dispatch.AUTO, *native.instruction_sets()])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    choice = dispatch.use_cpu_kernels(options.instruction_set)
    if choice.name == dispatch.REFERENCE:
        print(f"nothing to measure: {choice.why}", file=sys.stderr)
        return 1
    print(
        f"machine: {describe_machine()}, torch {torch.__version__}, kernels for {choice.name}, one thread", flush=True
    )
    ceilings = Ceilings()
    multiply = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in ceilings.multiply.items())
    print(f"ceilings: reading {ceilings.read / 1e9:.1f} GB/s; multiplying, GFLOP/s: {multiply}\n", flush=True)
    checks: list[Check] = []
    for name in options.only:
        section = MEASUREMENTS[name](ceilings)
        print(section, flush=True)
        checks += section.checks
    missed = [check for check in checks if not check.is_met]
    print(f"== {len(checks) - len(missed)} of {len(checks)} targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
