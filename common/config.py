"""The flags that processes share, by what they concern: a model's files, an engine, a node of a cluster.

The names are vLLM's where vLLM has the flag. How a config is read (flags, environment, file) is for
common/command_line.py to know; each process's own config.py adds its flags to these classes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, field_validator
from pydantic_settings import NoDecode

from common.command_line import ENV_PREFIX, Flags, build_parser, flag_name, parse, to_flags
from common.cpu_limits import usable_cores
from common.endpoints import check_bound_host, check_dialled, split_endpoints
from common.kv_layout import KVDType, Quantization

__all__ = [
    "DEFAULT_CONTROL_ENDPOINT",
    "DEFAULT_MODEL",
    "ENV_PREFIX",
    "MAX_THREADS",
    "ClusterFlags",
    "Count",
    "EngineFlags",
    "Flags",
    "ModelFlags",
    "NodeFlags",
    "Port",
    "PreemptionMode",
    "SchedulingPolicy",
    "Seconds",
    "Share",
    "Size",
    "build_parser",
    "default_num_threads",
    "flag_name",
    "parse",
    "to_flags",
]

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CONTROL_ENDPOINT = "tcp://127.0.0.1:8100"

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(le=10_000_000)]
Seconds = Annotated[float, Field(le=1e7)]
Lease = Annotated[float, Field(gt=0, le=3600)]  # as the fetch protocol has it
Share = Annotated[float, Field(gt=0, le=1)]
PreemptionMode = Literal["recompute", "swap", "auto"]
DType = Literal[KVDType, "auto"]
QuantizationFlag = Literal[Quantization, "auto"]
CPUKernels = Literal["auto", "reference", "avx512_bf16", "avx512", "avx2", "neon", "scalar"]
SchedulingPolicy = Literal["priority", "fcfs"]
Endpoints = Annotated[tuple[str, ...], NoDecode]  # NoDecode: "a,b" is split by us, not read as JSON

MAX_THREADS = 1024
_MAX_BYTES = 2**50


def default_num_threads() -> int:
    """Half of the cores this process may use: on one machine a prefill and a decode node share them."""
    return max(1, usable_cores() // 2)


def int_if_digits(value: object) -> object:
    """Flags and environment variables are text; a Literal of numbers wants numbers, and trips over those of more than
    64 bits."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 10 else value
    return str(value) if isinstance(value, int) and abs(value) >= 2**63 else value


def check_size(value: object) -> object:
    """Raises ValueError for what is no size: pydantic would take 1.5.2 for one byte."""
    if isinstance(value, str):
        is_size = _SIZE.fullmatch(value.strip()) is not None
    else:
        is_size = not isinstance(value, int | float) or 0 <= value < math.inf
    if not is_size:
        raise ValueError("must be a size such as 512MiB or 4GiB")
    return value


def check_max_size(value: ByteSize) -> ByteSize:
    if value > _MAX_BYTES:
        raise ValueError(f"must be at most {_MAX_BYTES >> 40}TiB")
    return value


def gibibytes_if_plain(value: object) -> object:
    """A number without a unit counts GiB, as vLLM's --swap-space does; one over a million can only mean bytes."""
    if isinstance(value, str) and value.strip()[-1:].isdecimal():
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value * 2**30 if value < 2**20 else value)
    return value


_SIZE = re.compile(r"\d{1,18}(\.\d{1,9})?\s*([A-Za-z]{1,3})?")
Size = Annotated[ByteSize, BeforeValidator(check_size), AfterValidator(check_max_size)]
GibibytesOrSize = Annotated[Size, BeforeValidator(gibibytes_if_plain), BeforeValidator(check_size)]


class ClusterFlags(Flags):
    """What protects the connections between the processes of a cluster."""

    title: ClassVar[str] = "cluster"

    cluster_secret_file: Path | None = Field(
        None,
        description="file with the cluster's secret, the same for every process; `tandem keygen FILE` makes one;"
        " without it processes talk within one machine only",
    )
    insecure: bool = Field(
        False, description="without a secret, allow addresses beyond this machine: not encrypted, open to anyone"
    )


class ModelFlags(Flags):
    """Which model, for every process that needs its files."""

    title: ClassVar[str] = "model"
    positional: ClassVar[str | None] = "model"

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="alias, local directory, GGUF file or Hub id; may stand first without the flag",
    )
    served_model_name: str | None = Field(None, min_length=1, description="name that clients use; default: --model")

    @property
    def public_model_name(self) -> str:
        return self.served_model_name or self.model


class EngineFlags(ModelFlags):
    """How an engine computes and how much memory it takes."""

    title: ClassVar[str] = "engine"

    dtype: DType = Field(
        "float32",
        description="type of weights and KV cache; auto: bfloat16 where the checkpoint has 16 bits and the CPU"
        " multiplies bfloat16, else float32",
    )
    quantization: QuantizationFlag = Field(
        "none",
        description="what matrices are multiplied as; int8 (per channel) and int4 (groups of 32) quantise any"
        " checkpoint when it is loaded; gguf keeps a GGUF file's own 4 or 8 bits; auto: gguf where there are any",
    )
    max_model_len: Count | None = Field(
        None, ge=1, description="longest prompt plus answer; default: the model's context"
    )
    num_threads: int = Field(0, ge=0, le=MAX_THREADS, description="threads for computing; 0 takes half of the cores")

    cpu_kernels: CPUKernels = Field(
        "auto",
        description="which kernels compute: those of an instruction set, or plain torch (reference); auto takes the"
        " best that this CPU runs",
    )
    exact_activations: bool = Field(
        False, description="never round activations to the weights' format (int8, bfloat16): slower, a little closer"
    )

    block_size: Annotated[Literal[8, 16, 32], BeforeValidator(int_if_digits)] = Field(
        16, description="tokens in a KV block; the same on every node of a cluster"
    )
    gpu_memory_utilization: Share = Field(
        0.9, description="share of a GPU's memory for weights, activations and KV blocks; on a CPU the next flag rules"
    )
    cpu_memory_utilization: Share = Field(
        0.2, description="the same on a CPU, of the memory this process may use; several nodes share a machine"
    )
    kv_cache_memory_bytes: Size | None = Field(
        None, gt=0, description="memory for KV blocks, such as 2GiB; default: what the share above leaves"
    )
    num_gpu_blocks_override: Count | None = Field(None, ge=2, description="number of KV blocks, whatever memory allows")
    enable_prefix_caching: bool = Field(True, description="keep finished blocks and reuse them for equal prefixes")
    swap_space: GibibytesOrSize | None = Field(
        None,
        ge=0,
        description="host memory for the blocks of preempted requests, such as 4GiB (a plain number counts GiB);"
        " default: an eighth of what the share above leaves, 0 beside a pool whose size was given",
    )
    preemption_mode: PreemptionMode = Field(
        "auto", description="what happens to a preempted request's KV; auto takes what costs less, as measured"
    )

    max_num_batched_tokens: Count = Field(
        128, ge=1, description="token budget of a step; a larger one is faster in total and lets streams wait longer"
    )
    max_num_seqs: Count = Field(
        64, ge=1, description="most requests that run at once; never more than the token budget holds"
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="compute long prompts in chunks, beside streams; off: whole, with a token budget that by default"
        " holds the context",
    )
    long_prefill_token_threshold: Count = Field(
        0, ge=0, description="most tokens of one prompt in a step, so that short ones pass by; 0: the budget alone"
    )
    max_num_partial_prefills: Count = Field(4, ge=1, description="most prompts that are partly computed at once")
    scheduling_policy: SchedulingPolicy = Field(
        "priority", description="who goes first: smaller priority, then earlier; fcfs ignores priorities"
    )

    record_steps: Path | None = Field(
        None, description="file that gets one line of JSON for each step; `tandem steps FILE` draws it"
    )

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or default_num_threads()


class NodeFlags(EngineFlags, ClusterFlags):
    """What prefill and decode nodes have in common."""

    title: ClassVar[str] = "node"
    of_one_process: ClassVar[frozenset[str]] = frozenset({"port", "fetch_port", "record_steps"})

    proxy: Endpoints = Field(
        (DEFAULT_CONTROL_ENDPOINT,), description="control endpoint of a proxy; repeat or separate by commas for several"
    )
    host: str = Field("127.0.0.1", description="address of this node's HTTP server (/health /ready /metrics)")
    port: Port = Field(0, description="port of this node's HTTP server; 0 takes any free one")
    fetch_host: str = Field(
        "127.0.0.1", description="address where peers fetch KV blocks from this node; 0.0.0.0: every one that it has"
    )
    fetch_port: Port = Field(0, description="port where peers fetch KV blocks from this node; 0 takes any free one")
    advertise_host: str | None = Field(
        None,
        min_length=1,
        description="host that peers are told to dial for blocks; default: the fetch host, and for 0.0.0.0 the address"
        " that this node reaches its proxy from",
    )

    @field_validator("proxy", mode="before")
    @classmethod
    def _split_endpoints(cls, value: object) -> object:
        return split_endpoints(value)

    @field_validator("proxy")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("must name at least one endpoint")
        return tuple(map(check_dialled, value))

    @field_validator("fetch_host")
    @classmethod
    def _check_fetch_host(cls, value: str) -> str:
        return check_bound_host(value)
