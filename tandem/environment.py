"""`tandem env`: what this machine and this installation offer, for bug reports and first looks. Starts nothing.

Shows names of environment variables, never their values; paths only of the cache.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

from common.argument_parser import Parser
from common.checkpoints.cache import default_cache_dir
from common.checkpoints.packaged import PACKAGED_MODELS
from common.config import default_num_threads
from common.cpu_limits import usable_cores
from common.errors import ConfigError
from common.runner.process_memory import Bound, ProcessMemory
from kernels.cpu.native import NativeKernelsError, instruction_sets
from kernels.dispatch import AUTO, REFERENCE, picked, use_cpu_kernels

_PACKAGES = (
    "tandem-serve",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "llguidance",
    "pydantic",
    "pyzmq",
    "aiohttp",
    "uvloop",
    "huggingface_hub",
    "transformers",
    "flashinfer-python",
)
# what decides how fast matrices are multiplied, x86 and ARM
_FEATURES = (
    *("sse4_2", "f16c", "fma", "avx", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_CPU_KERNELS = "TANDEM_CPU_KERNELS"
_VARIABLES = ("TANDEM_", "OMP_", "MKL_", "HF_", "CUDA_VISIBLE_DEVICES", "PYTORCH_")


def main(argv: Sequence[str]) -> int:
    build_parser().parse_args(argv)
    for name, value in found():
        print(f"{name:<18} {value}")
    return 0


def found() -> Iterator[tuple[str, str]]:
    torch = _torch()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "cpu", _cpu_field("model name") or platform.processor() or "unknown"
    yield "cpu features", " ".join(cpu_features()) or "unknown"
    yield "cores", f"{usable_cores()} usable of {os.cpu_count()}"
    yield "memory limit", _bound(ProcessMemory().limit)
    yield "memory free", _bound(ProcessMemory().free)
    yield "devices", _devices(torch)
    yield "kernels", _kernels(torch)
    yield "threads", _threads(torch)
    for package in _PACKAGES:
        yield package, _version(package)
    yield "cache", _cache()
    yield "model aliases", ", ".join(PACKAGED_MODELS)
    yield "variables set", ", ".join(sorted(name for name in os.environ if name.startswith(_VARIABLES))) or "none"


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those that matter here, of the first core."""
    has = set((_cpu_field("flags", cpuinfo) or _cpu_field("Features", cpuinfo) or "").split())
    return [feature for feature in _FEATURES if feature in has]


def _cpu_field(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name)
    return next(values, None)


def _bound(read: Callable[[], Bound]) -> str:
    try:
        bound = read()
    except ConfigError as error:
        return f"unknown: {error.message}"
    return f"{bound.num_bytes / 2**30:.1f} GiB ({bound.source})"


def _cache() -> str:
    try:
        return str(default_cache_dir())
    except ConfigError as error:
        return f"unknown: {error.message}"


def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _devices(torch: ModuleType | None) -> str:
    if torch is None:
        return "unknown: torch is not installed"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([*names, f"CPU (torch uses {torch.backends.cpu.get_cpu_capability()})"])


def _kernels(torch: ModuleType | None) -> str:
    """Which implementation serves which op, and why it is that one."""
    if torch is None:
        return "none: torch is not installed, so only a proxy can run here"
    if torch.cuda.is_available():
        why = "there are kernels for CPUs only, the GPU is not used"
    else:
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        why = f"no GPU is usable, torch is built {build}"
    try:
        choice = use_cpu_kernels(os.environ.get(_CPU_KERNELS, AUTO))
    except NativeKernelsError as error:
        return f"none for {_CPU_KERNELS}: {error}"
    ops = defaultdict(list)
    for op, place in picked("cpu").items():
        ops[place.rpartition(".")[0]].append(op)
    served = "; ".join(f"{module}: {', '.join(names)}" for module, names in ops.items())
    others = [name for name in (*instruction_sets(), REFERENCE) if name != choice.name]
    there_are = f"; --cpu-kernels also takes {', '.join(others)}" if others else ""
    return f"cpu ({why}) - {choice.name}, {choice.why}{there_are} - {served}"


def _threads(torch: ModuleType | None) -> str:
    ours = f"{default_num_threads()} for a node by default"
    if torch is None:
        return ours
    blas = "with oneDNN" if torch.backends.mkldnn.is_available() else "without oneDNN"
    return f"{ours}; torch by itself {torch.get_num_threads()}, {blas}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def build_parser() -> argparse.ArgumentParser:
    return Parser(
        prog="tandem env",
        usage="%(prog)s",
        description="What this machine and this installation offer: versions, processor, memory and who limits it, "
        "which kernels are chosen and why. Put its output into a bug report.",
    )
