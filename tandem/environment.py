"""`tandem env`: what this machine and this installation offer, for bug reports and first looks. Starts nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata

from common.checkpoints.cache import default_cache_dir
from common.checkpoints.packaged import PACKAGED_MODELS

_PACKAGES = ("tandem-serve", "torch", "transformers", "flashinfer-python", "pyzmq", "aiohttp", "tokenizers")


def main() -> int:
    for name, value in found():
        print(f"{name:<18} {value}")
    return 0


def found() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "python", platform.python_version()
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    yield "devices", _devices()
    for package in _PACKAGES:
        yield package, _version(package)
    yield "cache", str(default_cache_dir())
    yield "model aliases", ", ".join(PACKAGED_MODELS)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    try:
        import torch
    except ImportError:
        return "unknown (torch is not installed)"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) or f"CPU ({torch.backends.cpu.get_cpu_capability()})"
