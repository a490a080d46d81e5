"""What a comparison found: a table, a line on what it means, figures held against targets. Knows no engine."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """A figure with its target: at least `target`, or below it when `is_limit`."""

    name: str
    value: float
    target: float
    unit: str
    is_limit: bool = False

    @property
    def is_met(self) -> bool:
        return self.value < self.target if self.is_limit else self.value >= self.target

    def __str__(self) -> str:
        sign = "<" if self.is_limit else ">="
        mark = "PASS" if self.is_met else "FAIL"
        return f"{mark}  {self.name}: {self.value:.2f}{self.unit} (target {sign} {self.target:g}{self.unit})"


@dataclass(frozen=True)
class Section:
    """meaning: what is compared and how to read it. notes: lines below the table."""

    title: str
    meaning: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    checks: Sequence[Check] = ()

    def __str__(self) -> str:
        lines = [f"== {self.title}", self.meaning, "", *format_table(self.header, self.rows)]
        lines += ["", *self.notes] if self.notes else []
        lines += ["", *map(str, self.checks)] if self.checks else []
        return "\n".join(lines) + "\n"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first one to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (header, *rows)
    ]


def describe_machine() -> str:
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return f"{_cpu_name()}, {cores}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def names_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an --only flag: names of parts, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse
