"""The kernels' threads: used by several Python threads at once, after a fork, and when the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kernels
from kernels import ops
from kernels.cpu import native
from tests.kernels.conftest import UseKernels

pytestmark = pytest.mark.skipif(not native.instruction_sets(), reason="no compiled kernels here")

PRELUDE = """
import os, sys, threading
import torch
from kernels import dispatch, ops
dispatch.use_cpu_kernels(num_threads=3)
weight, x = ops.pack_weight(torch.randn(300, 200)), torch.randn(50, 200)
right = ops.linear(x, weight)
"""
FORK = """
child = os.fork()
if child == 0:
    for _ in range(50):
        assert torch.equal(ops.linear(x, weight), right)
    sys.exit(7)  # by way of the interpreter's end, with all that is torn down there
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert torch.equal(ops.linear(x, weight), right)
"""
EXIT_WHILE_COMPUTING = """
from kernels.cpu import native
machine, out, started = native.machine(), torch.empty_like(right), threading.Event()
x_at, out_at = x.data_ptr(), out.data_ptr()
def compute():  # nothing of torch in here: its own calls abort the process when the interpreter ends under them
    while True:
        machine.linear(weight.packed, 0, x_at, 50, out_at)
        started.set()
threading.Thread(target=compute, daemon=True).start()
started.wait()
"""


def run_script(script: str) -> None:
    """In a process of its own, with the kernels that this one has."""
    env = os.environ | {"PYTHONPATH": str(Path(kernels.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_several_python_threads_at_once(native_kernels: UseKernels) -> None:
    """One machine serves them one after the other; nobody's working memory shows in another's result."""
    native_kernels(3)
    weights = [ops.pack_weight(torch.randn(50 + 20 * i, 64)) for i in range(4)]
    inputs = [torch.randn(3 + 9 * i, 64) for i in range(4)]
    right = [ops.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]

    def compute(number: int) -> bool:
        return all(torch.equal(ops.linear(inputs[number], weights[number]), right[number]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compute, range(4)))


def test_many_tiny_jobs_one_after_the_other(native_kernels: UseKernels) -> None:
    """Each is over before the threads have woken up for it: one that comes late takes from the next job, or nothing."""
    native_kernels(3)
    rows = {size: torch.randn(size, 16) for size in (17, 33, 40, 100)}  # two to seven tiles each
    right = {size: ops.rms_norm(x, torch.ones(16), 1e-5) for size, x in rows.items()}
    for _ in range(1_000):
        for size, x in rows.items():
            assert torch.equal(ops.rms_norm(x, torch.ones(16), 1e-5), right[size])


def test_machines_come_and_go(native_kernels: UseKernels) -> None:
    """What was packed before keeps the threads that it was packed with."""
    x, kept = torch.randn(40, 32), []
    for num_threads in (1, 3, 2, 4, 1):
        native_kernels(num_threads)
        kept.append(ops.pack_weight(torch.ones(70, 32)))
    found = [ops.linear(x, weight) for weight in kept]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0, must be at least 1"):
        native._compiled.Machine(native.instruction_sets()[0], 0)


def test_a_forked_child_computes_and_ends() -> None:
    run_script(FORK)


def test_the_interpreter_ends_while_a_thread_computes() -> None:
    run_script(EXIT_WHILE_COMPUTING)
