"""What drawing the tokens of a step costs, as a share of the step: 64 requests on the real model.

    python -m benchmarks.sampling [--only mixed,greedy] [--quick]

Each arm gives all requests the same parameters; `mixed` deals them eight kinds. Greedy requests that ask for nothing
pay for the highest logit and for nothing else. A second table holds answers that must match a JSON schema against free
ones, alone and eight at once. Exits with 1 when a target is missed, but not with --quick.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_driver import count_outputs
from benchmarks.engine_report import Check, Section, describe_machine, names_among
from benchmarks.load import filler
from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL
from common.engine.engine import Engine
from common.grammar.compiler import GrammarCompiler
from common.model_config import load_model_config
from common.request import Request
from common.runner.factory import load_weights, make_layout
from common.runner.kv_cache import KVCache
from common.runner.model_runner import ModelRunner
from common.runner.sampler import Sampler, SamplingRow
from common.sampling_params import SamplingParams
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager
from common.scheduling.output import SampledToken
from common.scheduling.scheduler import Scheduler
from common.structured_output import StructuredOutput

NUM_REQUESTS, NUM_IN, BLOCK_SIZE = 64, 64, 16
END_IDS = frozenset({0, 2})
Fields = dict[str, Any]

ARMS: dict[str, list[Fields]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.8}],
    "top_k": [{"top_k": 50}],
    "top_p": [{"temperature": 0.7, "top_p": 0.9}],
    "top_p at 1.0": [{"temperature": 1.0, "top_p": 0.95}],
    "min_p": [{"min_p": 0.05}],
    "penalties of outputs": [{"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5}],
    "repetition penalty": [{"temperature": 0.0, "repetition_penalty": 1.1}],
    "logit_bias": [{"temperature": 0.0, "logit_bias": {1000 + i: -5.0 for i in range(100)}}],
    "min_tokens": [{"temperature": 0.0, "min_tokens": 64}],
    "bad words": [{"temperature": 0.0, "bad_words_token_ids": ((7,), (9,), *((i, i + 1) for i in range(1, 65)))}],
    "allowed ids": [{"temperature": 0.0, "allowed_token_ids": tuple(range(0, 49152, 2))}],
    "logprobs": [{"temperature": 0.0, "logprobs": 5}],
}
ARMS["mixed"] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.6, "min_p": 0.05, "min_tokens": 16},
    {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 5},
    {**ARMS["bad words"][0], **ARMS["logit_bias"][0], "temperature": 1.0, "top_p": 0.9},
]

NAMES = [*ARMS, "schema"]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
PEOPLE = json.dumps({"type": "array", "items": PERSON, "minItems": 1000})  # no answer of these runs comes to its end
SCHEMA: Fields = {"temperature": 0.0, "structured_output": StructuredOutput("json_schema", PEOPLE)}


class TimedSampler(Sampler):
    """seconds: of the newest call."""

    seconds = 0.0

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        start = time.perf_counter()
        sampled = super().__call__(logits, rows)
        self.seconds = time.perf_counter() - start
        return sampled


@dataclass(frozen=True)
class Costs:
    """Medians over the steps in which all requests decode."""

    sampling_seconds: float
    step_seconds: float

    @property
    def share(self) -> float:
        return self.sampling_seconds / self.step_seconds


class Bench:
    """The engine as a decode node has it, with a sampler that is timed."""

    def __init__(self, model_dir: Path, num_threads: int, num_steps: int, num_requests: int = NUM_REQUESTS) -> None:
        config = load_model_config(model_dir)
        layout = make_layout(config, BLOCK_SIZE, "float32")
        model = load_weights(model_dir, config, "float32", with_head=True, num_threads=num_threads)
        self._grammars = GrammarCompiler(model_dir, config.vocab_size, config.eos_token_ids)
        self._num_requests = num_requests
        self._num_steps = num_steps
        self._max_tokens = 2 * num_steps + num_requests
        num_blocks = num_requests * -(-(NUM_IN + self._max_tokens) // BLOCK_SIZE) + 1
        limits = SchedulerConfig(
            max_num_batched_tokens=1024, max_num_seqs=num_requests, max_model_len=NUM_IN + self._max_tokens
        )
        self._sampler = TimedSampler()
        scheduler = Scheduler(limits, KVCacheManager(layout, num_blocks))
        self._engine = Engine(scheduler, ModelRunner(model, KVCache(layout, num_blocks, 0), self._sampler))

    def run(self, kinds: Sequence[Fields]) -> Costs:
        for i in range(self._num_requests):
            self._engine.add(self._request(i, kinds[i % len(kinds)]))
        costs: list[tuple[float, float]] = []
        while len(costs) < self._num_steps:
            start = time.perf_counter()
            num_outputs = count_outputs(self._engine.step())
            seconds = time.perf_counter() - start
            if num_outputs == self._num_requests and self._engine.stats().num_queued_tokens <= self._num_requests:
                costs.append((self._sampler.seconds, seconds))
        for i in range(self._num_requests):
            self._engine.abort(f"r{i}")
        while self._engine.scheduler.requests:
            self._engine.step()
        sampling, step = np.median(np.array(costs[1:]), axis=0)  # the first one may hold the end of the prompts
        return Costs(float(sampling), float(step))

    def _request(self, number: int, fields: Fields) -> Request:
        wanted = fields.get("structured_output")
        params = SamplingParams(**fields, seed=number, max_tokens=self._max_tokens, ignore_eos=wanted is None)
        stops = END_IDS if params.min_tokens or wanted else frozenset()
        grammar = None if wanted is None else self._grammars.compile(wanted)
        return Request(f"r{number}", filler(NUM_IN, number), params, stop_token_ids=stops, grammar=grammar)


def compare_arms(bench: Bench, names: Sequence[str]) -> Section:
    bench.run(ARMS["greedy"])  # memory of the first steps is new
    found = {name: bench.run(ARMS[name]) for name in names}
    rows = [
        [name, f"{c.sampling_seconds * 1e3:.1f}", f"{c.step_seconds * 1e3:.0f}", f"{c.share * 100:.1f}"]
        for name, c in found.items()
    ]
    mixed = found.get("mixed")
    return Section(
        title=f"sampling: {NUM_REQUESTS} requests, prompts of {NUM_IN} tokens",
        meaning="Time in the sampler beside the whole step of the engine, its median over full steps.",
        header=("parameters", "sampling ms", "step ms", "share %"),
        rows=rows,
        checks=[Check("sampling of mixed parameters", mixed.share * 100, 15.0, " %", is_limit=True)] if mixed else [],
    )


def compare_schema(model_dir: Path, num_threads: int, num_steps: int) -> Section:
    rows, checks = [], []
    for num_requests in (1, 8):
        bench = Bench(model_dir, num_threads, num_steps, num_requests)
        bench.run([SCHEMA])  # the lexer's automaton is built, memory of the first steps is new
        runs = [(bench.run(ARMS["greedy"]), bench.run([SCHEMA])) for _ in range(5)]
        free, ruled = (min(run[i].step_seconds for run in runs) for i in (0, 1))
        rows.append([str(num_requests), f"{free * 1e3:.1f}", f"{ruled * 1e3:.1f}", f"{ruled / free:.3f}"])
        checks.append(Check(f"time of a token, {num_requests} at once", ruled / free, 1.2, " x", is_limit=True))
    return Section(
        title="JSON schema: greedy answers that must match, beside free ones",
        meaning="The whole step of the engine, mask included: its median in the quickest of five runs that take turns.",
        header=("requests", "free ms", "schema ms", "ratio"),
        rows=rows,
        checks=checks,
    )


def main() -> int:
    options = _parser().parse_args()
    print(f"machine: {describe_machine()}, torch {torch.__version__}, {options.num_threads} thread(s)")
    print(f"model: {options.model}, float32")
    print(f"command: python -m benchmarks.sampling {shlex.join(sys.argv[1:])}\n", flush=True)
    num_steps = 4 if options.quick else options.steps
    model_dir = resolve_model(options.model)
    sections = []
    if arms := [name for name in options.only if name != "schema"]:
        sections.append(compare_arms(Bench(model_dir, options.num_threads, num_steps), arms))
    if "schema" in options.only:
        sections.append(compare_schema(model_dir, options.num_threads, num_steps))
    print("\n\n".join(map(str, sections)))
    return 0 if options.quick or all(check.is_met for section in sections for check in section.checks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", type=names_among(NAMES), default=NAMES, help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; no figures to quote")
    parser.add_argument("--steps", type=int, default=20, help="full steps of each kind of parameters")
    parser.add_argument("--num-threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
