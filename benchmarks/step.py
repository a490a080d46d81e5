"""What one step of a model costs on one machine, by precision: decode rows and a long prompt, without a service.

    python -m benchmarks.step [--rounds 20] [--num-threads 1]

A row of the table is a batch: 1, 8 and 32 decode rows at position 300, and a prompt of 1,000 tokens in one step; a
column is what computes it: plain torch in float32, then the CPU kernels in float32, bfloat16, int8 and a GGUF file's
own bits. Each time is the median, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine_report import describe_machine, format_table
from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL
from common.kv_layout import KVDType, Quantization
from common.model_config import load_model_config
from common.request import Request
from common.runner.factory import load_weights, make_layout
from common.runner.input_batch import InputBatch
from common.runner.kv_cache import TORCH_DTYPES, KVCache
from common.scheduling.output import ScheduledRequest
from kernels.dispatch import AUTO, REFERENCE
from kernels.plan import AttentionShape

BLOCK_SIZE, POSITION, PROMPT = 16, 300, 1000
BATCHES: dict[str, list[tuple[int, int]]] = {  # (tokens before, rows) of each request
    **{str(num_rows): [(POSITION, 1)] * num_rows for num_rows in (1, 8, 32)},
    f"prompt of {PROMPT}": [(0, PROMPT)],
}
COLUMNS: dict[str, tuple[str, KVDType, Quantization]] = {
    "torch": (REFERENCE, "float32", "none"),
    "float32": (AUTO, "float32", "none"),
    "bfloat16": (AUTO, "bfloat16", "none"),
    "int8": (AUTO, "bfloat16", "int8"),
    "gguf": (AUTO, "bfloat16", "gguf"),
}


class Model:
    """A model in one precision, and a pool that its largest batch fits into."""

    def __init__(self, directory: Path, column: str, num_threads: int) -> None:
        kernels, dtype, quantization = COLUMNS[column]
        config = load_model_config(directory)
        self._model = load_weights(
            directory,
            config,
            dtype,
            with_head=True,
            num_threads=num_threads,
            quantization=quantization,
            cpu_kernels=kernels,
        )
        layout = make_layout(config, BLOCK_SIZE, dtype, quantization)
        self._pool = KVCache(layout, 1 + 32 * layout.num_blocks_for(POSITION + 1)).pool
        shape = (layout.num_layers, config.num_heads, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
        self._input_batch = InputBatch(AttentionShape(*shape, TORCH_DTYPES[dtype]))

    @torch.inference_mode()
    def step(self, batch: list[tuple[int, int]]) -> None:
        scheduled, next_block = [], 1
        for number, (before, num_rows) in enumerate(batch):
            end = next_block - (-(before + num_rows) // BLOCK_SIZE)
            tokens = [(7 * i + number) % 1000 + 5 for i in range(before + num_rows)]
            request = Request(str(number), tokens)
            table = list(range(next_block, end))
            scheduled.append(ScheduledRequest(request, before, num_rows, table, is_last_chunk=True))
            next_block = end
        hidden = self._model.forward(self._input_batch.make(scheduled), self._pool, lambda _layer: True)
        assert hidden is not None
        self._model.logits(hidden[-len(batch) :])


def median_ms(model: Model, batch: list[tuple[int, int]], rounds: int) -> float:
    model.step(batch)  # warm
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model.step(batch)
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="one that was made of a GGUF file")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-threads", type=int, default=1)
    options = parser.parse_args()
    directory = resolve_model(options.model)
    rows = {name: [name] for name in BATCHES}
    for column in COLUMNS:
        model = Model(directory, column, options.num_threads)
        for name, batch in BATCHES.items():
            rounds = options.rounds if len(batch) < 32 and batch[0][1] == 1 else max(options.rounds // 5, 1)
            rows[name].append(f"{median_ms(model, batch, rounds):.1f}")
    print(
        f"machine: {describe_machine()}, torch {torch.__version__}, {options.num_threads} thread(s), {options.model}\n"
    )
    print(*format_table(["rows", *COLUMNS], list(rows.values())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
