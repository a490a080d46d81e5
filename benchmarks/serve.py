"""The split service beside a loop over transformers' `generate`, in one run on this machine.

    python benchmarks/serve.py [--model smollm2-135m-instruct] [--rounds 3]

Prints: output tokens/s at concurrency 8 (256 tokens in, 64 out; one thread for each node) against the loop with two
threads; one stream's tokens/s against `generate` with one thread; the hand-off gap (output 0 to output 1) in ordinary
steps; the proxy's memory. The arms alternate, medians are given, the ratios are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import load  # noqa: E402
from benchmarks.service import Service, resident_bytes, start_service  # noqa: E402
from common.checkpoints.resolve import resolve_model  # noqa: E402

NUM_IN, NUM_OUT, CONCURRENCY, NUM_REQUESTS = 256, 64, 8, 24
SINGLE_IN, SINGLE_OUT = 32, 96
HANDOFF_IN = 512

_TRANSFORMERS_ARM = """
import sys, time, warnings
import torch
from transformers import AutoModelForCausalLM, logging
warnings.simplefilter("ignore"); logging.set_verbosity_error()
sys.path.insert(0, sys.argv[4])
from benchmarks.load import filler
threads, num_in, num_out = int(sys.argv[1]), *map(int, sys.argv[2].split("x"))
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(sys.argv[3], dtype=torch.float32).eval()
def one(salt):
    ids = torch.tensor([filler(num_in, salt)])
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_out,
                       min_new_tokens=num_out, pad_token_id=0)
one(0)
for line in sys.stdin:
    n = int(line); start = time.perf_counter()
    for salt in range(n): one(salt + 1)
    print(n * num_out / (time.perf_counter() - start), flush=True)
"""


class TransformersLoop:
    """`generate` in a process of its own; it waits while the other arm is measured."""

    def __init__(self, model_dir: Path, *, num_threads: int, num_in: int, num_out: int) -> None:
        args = [
            sys.executable,
            "-c",
            _TRANSFORMERS_ARM,
            str(num_threads),
            f"{num_in}x{num_out}",
            str(model_dir),
            str(ROOT),
        ]
        self._process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tokens_per_second(self, num_requests: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_requests}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def transformers_loop(model_dir: Path, *, num_threads: int, num_in: int, num_out: int) -> Iterator[TransformersLoop]:
    loop = TransformersLoop(model_dir, num_threads=num_threads, num_in=num_in, num_out=num_out)
    try:
        yield loop
    finally:
        loop.close()


def service_throughput(service: Service, round_number: int) -> float:
    prompts = [load.filler(NUM_IN, 1000 * (round_number + 1) + i) for i in range(NUM_REQUESTS)]
    samples, wall = asyncio.run(load.run(service.url, prompts, NUM_OUT, CONCURRENCY))
    return sum(s.num_tokens for s in samples) / wall


def service_single_stream(service: Service, salt: int) -> float:
    """Output tokens/s of one request alone, prompt included (as the loop over `generate` counts it)."""
    samples, wall = asyncio.run(load.run(service.url, [load.filler(SINGLE_IN, salt)], SINGLE_OUT, 1))
    return samples[0].num_tokens / wall


def handoff_gap_in_steps(service: Service, salt: int) -> tuple[float, float]:
    """(gap between output 0 and 1 in milliseconds, the same in ordinary steps) of one split request alone."""
    samples, _ = asyncio.run(load.run(service.url, [load.filler(HANDOFF_IN, salt)], 32, 1))
    gaps = samples[0].gaps
    return gaps[0] * 1e3, gaps[0] / load.median(gaps[1:])


def compare(name: str, pairs: list[tuple[float, float]], target: float) -> None:
    """pairs: (ours, transformers') tokens/s, measured one after the other."""
    ours, theirs = (load.median(side) for side in zip(*pairs, strict=True))
    ratio = load.median([a / b for a, b in pairs])
    print(f"{name}: {ours:.1f} tok/s, transformers {theirs:.1f}: {ratio:.2f}x (target {target}x)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model_dir = resolve_model(options.model)
    with start_service(options.model, node_flags=["--num-threads", "1"]) as service:
        asyncio.run(load.run(service.url, [load.filler(64, 7)], 4, 1))  # warm
        with transformers_loop(model_dir, num_threads=2, num_in=NUM_IN, num_out=NUM_OUT) as loop:
            pairs = [(service_throughput(service, i), loop.tokens_per_second(4)) for i in range(options.rounds)]
        compare(f"concurrency {CONCURRENCY}, {NUM_IN} in, {NUM_OUT} out", pairs, 3.0)
        with transformers_loop(model_dir, num_threads=1, num_in=SINGLE_IN, num_out=SINGLE_OUT) as loop:
            pairs = [(service_single_stream(service, 70 + i), loop.tokens_per_second(1)) for i in range(options.rounds)]
        compare(f"one stream, {SINGLE_IN} in, {SINGLE_OUT} out", pairs, 1.0)
        time.sleep(0.5)
        handoffs = [handoff_gap_in_steps(service, 90 + i) for i in range(2 * options.rounds + 1)]
        gap, steps = (load.median(x) for x in zip(*handoffs, strict=True))
        print(f"hand-off gap, {HANDOFF_IN} in, alone: {gap:.1f} ms, {steps:.2f} ordinary steps (target 1.5)")
        print(f"proxy memory: {resident_bytes(service.proxy_pid) / 1e6:.0f} MB (target 250)")


if __name__ == "__main__":
    main()
