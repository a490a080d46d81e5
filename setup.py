"""Builds the compiled CPU kernels (kernels/cpu/src); all else about the package stands in pyproject.toml.

Every instruction set is the same sources compiled with other flags. One that the compiler does not know is left out.
Without a compiler the package is installed without them: the kernels in plain torch serve then, and say so.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

SOURCES = "kernels/cpu/src"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
INSTRUCTION_SETS = {
    "x86_64": {
        "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
        "avx512": AVX512,
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "scalar": [],
    },
    "aarch64": {"neon": [], "scalar": ["-fno-tree-vectorize"]},
}
# No contraction of our own sums by the compiler: what is rounded once and what twice is written down.
FLAGS = ["-O3", "-g0", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-pthread"]


def sanitizer_flags() -> list[str]:
    """TANDEM_SANITIZE=address,undefined: for `make test-sanitized`.

    All that is inlined and unrolled has checks of its own, so that the plain flags compile for over ten minutes. Left
    out are the checks of pointers that AddressSanitizer makes better, and calls take the place of inlined ones.
    """
    wanted = os.environ.get("TANDEM_SANITIZE")
    if not wanted:
        return []
    return [
        *("-O1", "-g1", f"-fsanitize={wanted}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
        *("-fno-sanitize=null,alignment,object-size,pointer-overflow", "-fno-sanitize-address-use-after-scope"),
        *("--param", "asan-instrumentation-with-call-threshold=0"),
    ]


class BuildKernels(build_ext):
    def run(self) -> None:
        try:
            super().run()
        except (BaseError, CompileError, LinkError, OSError) as error:  # the compiler's may be no BaseError
            print(
                f"tandem: the compiled CPU kernels could not be built ({error});"
                " installing without them, plain torch serves instead, several times slower",
                file=sys.stderr,
            )
            self.extensions = []  # nothing to copy

    def build_extension(self, ext: Pybind11Extension) -> None:
        extra = sanitizer_flags()
        sets = INSTRUCTION_SETS.get(platform.machine(), {"scalar": []})
        if wanted := os.environ.get("TANDEM_INSTRUCTION_SETS"):
            sets = {name: sets[name] for name in wanted.split(",") if name in sets}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda name: self._compile(name, sets[name] + extra), sets)
            compiled = dict(zip(sets, objects, strict=True))
        missing = [name for name, objects in compiled.items() if not objects]
        if missing:
            print(f"tandem: this compiler cannot build kernels for {', '.join(missing)}", file=sys.stderr)
        ext.extra_objects = [path for objects in compiled.values() for path in objects]
        ext.define_macros = [(f"TANDEM_HAS_{name.upper()}", "1") for name, objects in compiled.items() if objects]
        ext.extra_compile_args += [*FLAGS, *extra]
        ext.extra_link_args += ["-pthread", *extra]
        super().build_extension(ext)

    def _compile(self, name: str, flags: list[str]) -> list[str]:
        """Object files; none when the compiler does not know the flags."""
        try:
            return self.compiler.compile(
                [f"{SOURCES}/isa.cpp"],
                output_dir=str(Path(self.build_temp) / name),
                macros=[("TANDEM_ISA", name)],
                extra_postargs=[*FLAGS, "-fvisibility=hidden", "-Wno-maybe-uninitialized", *flags],
            )
        except CompileError:
            return []


setup(
    ext_modules=[
        Pybind11Extension(
            "kernels.cpu._native",
            [f"{SOURCES}/{name}.cpp" for name in ("binding", "memory", "threads", "workspace")],
            depends=sorted(glob(f"{SOURCES}/*")),
            cxx_std=20,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
