"""Draws a node's steps over time with matplotlib: batch, KV blocks, queues, preemptions, step duration.

Many steps are drawn as few: those of one stretch of time as one, by their mean, their maximum or their sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tandem.steps import Array, Steps

MAX_STRETCHES: Final = 1000  # about as many as the chart has columns of pixels
_NUM_PREEMPTION_BARS: Final = 120


def draw(steps: Steps, output: Path) -> None:
    """Writes a .png or .svg. Raises OSError when it cannot."""
    header, stretches = steps.header, Stretches(steps)
    figure = Figure(figsize=(12, 13), layout="constrained")
    batch, blocks, queue, preemptions, duration = figure.subplots(5, 1, sharex=True)
    figure.suptitle(f"{header.role} node {header.node} · {header.model} · {len(steps):,} steps", parse_math=False)
    _draw_batch(batch, stretches)
    _draw_blocks(blocks, stretches)
    _draw_queue(queue, stretches)
    _draw_preemptions(preemptions, steps)
    _draw_duration(duration, stretches)
    for axes in (batch, blocks, queue, preemptions, duration):
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    duration.set_xlabel("seconds from the engine's start")
    figure.savefig(output, dpi=110)


class Stretches:
    """Steps, those that began in the same thousandth of the time taken together when there are many.

    start, end: seconds, arrays with one value for each stretch.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        time = steps["time"]
        if len(steps) <= MAX_STRETCHES:
            self._first = np.arange(len(steps))
        else:
            bins = np.floor((time - time[0]) / max(np.ptp(time), 1e-9) * (MAX_STRETCHES - 1))
            self._first = np.flatnonzero(np.diff(bins, prepend=-1))
        last = np.append(self._first[1:], len(steps)) - 1
        self.start = time[self._first]
        self.end = (time + steps.seconds)[last]

    def mean(self, values: Array) -> Array:
        counts = np.diff(np.append(self._first, len(values)))
        mean: Array = np.add.reduceat(values.astype(float), self._first) / counts
        return mean

    def maximum(self, values: Array) -> Array:
        maximum: Array = np.maximum.reduceat(values, self._first)
        return maximum

    def until_next(self, values: Array) -> tuple[Array, Array]:
        """x, y of a line that holds each stretch's value until the next one's, for what lasts between steps."""
        return np.append(self.start, self.end[-1]), np.append(values, values[-1:])

    def while_busy(self, *values: Array) -> tuple[Array, ...]:
        """x and each y of lines that fall to 0 while nothing was computed."""
        busy = self.end - self.start
        idle = np.append(self.start[1:] - self.end[:-1], np.inf)
        falls = idle > max(2 * float(np.median(busy)), float(self.end[-1] - self.start[0]) / MAX_STRETCHES * 2)
        where = np.flatnonzero(falls) + 1
        return np.insert(self.start, where, self.end[falls]), *(np.insert(value, where, 0) for value in values)


def _draw_batch(axes: Axes, stretches: Stretches) -> None:
    steps = stretches.steps
    x, decode, prefill, budget = stretches.while_busy(
        stretches.mean(steps["num_decode_tokens"]),
        stretches.mean(steps["num_prefill_tokens"]),
        stretches.maximum(steps["token_budget"]),
    )
    axes.fill_between(x, decode, step="post", linewidth=0, label="decode", color="tab:green")
    axes.fill_between(x, decode, decode + prefill, step="post", linewidth=0, label="prefill", color="tab:blue")
    axes.step(x, budget, where="post", label="budget", color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel("tokens of a step")


def _draw_blocks(axes: Axes, stretches: Stretches) -> None:
    steps = stretches.steps
    x, used = stretches.until_next(stretches.maximum(steps["num_used_blocks"]))
    _, cached = stretches.until_next(stretches.maximum(steps["num_cached_blocks"]))
    _, unused = stretches.until_next(stretches.maximum(steps["num_unused_slots"]) / steps.header.block_size)
    axes.fill_between(x, used, step="post", linewidth=0, label="used", color="tab:orange")
    axes.fill_between(x, used, used + cached, step="post", linewidth=0, label="free, but cached", color="tab:blue")
    axes.step(x, unused, where="post", label="unused slots\n(in blocks)", color="tab:red", linewidth=0.8)
    axes.axhline(steps["num_blocks"].max(), label="all", color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel("KV blocks")


def _draw_queue(axes: Axes, stretches: Stretches) -> None:
    for field, label, color in (
        ("num_running", "running", "tab:green"),
        ("num_waiting", "waiting", "tab:gray"),
        ("num_waiting_for_kv", "waiting for KV", "tab:purple"),
        ("num_swapped", "swapped", "tab:red"),
    ):
        x, count = stretches.until_next(stretches.maximum(stretches.steps[field]))
        axes.step(x, count, where="post", label=label, color=color, linewidth=1)
    axes.set_ylabel("requests")


def _draw_preemptions(axes: Axes, steps: Steps) -> None:
    time, swapped = steps["time"], steps["num_swap_preempted"]
    edges = np.linspace(time[0], max(time[-1] + steps.seconds[-1], time[0] + 1e-6), _NUM_PREEMPTION_BARS + 1)
    width = float(edges[1] - edges[0])
    recompute, _ = np.histogram(time, edges, weights=steps["num_preempted"] - swapped)
    swap, _ = np.histogram(time, edges, weights=swapped)
    axes.bar(edges[:-1], recompute, width, align="edge", label="recompute", color="tab:red")
    axes.bar(edges[:-1], swap, width, bottom=recompute, align="edge", label="swap", color="tab:purple")
    axes.set_ylabel(f"preemptions in {width:.2g} s")


def _draw_duration(axes: Axes, stretches: Stretches) -> None:
    steps = stretches.steps
    swap = steps["swap_seconds"]
    parts = {
        "schedule": steps["schedule_seconds"],
        "swap": swap,
        "execute": steps["execute_seconds"] - swap,
        "update": steps["update_seconds"],
    }
    colors = ("tab:gray", "tab:purple", "tab:green", "tab:olive")
    means = [stretches.mean(values) * 1e3 for values in parts.values()]
    x, longest, *heights = stretches.while_busy(stretches.maximum(steps.seconds) * 1e3, *means)
    bottom = np.zeros_like(x)
    for name, height, color in zip(parts, heights, colors, strict=True):
        axes.fill_between(x, bottom, bottom + height, step="post", linewidth=0, label=name, color=color)
        bottom = bottom + height
    if len(stretches.start) < len(steps):  # else the longest of a stretch is the one
        axes.step(x, longest, where="post", label="longest", color="black", linewidth=0.6)
    axes.set_ylabel("ms of a step")
