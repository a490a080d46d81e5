"""Which lines of a process's output say why it ended, whatever form they have."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from typing import Literal

import pytest

from common.logging import configure_logging, log_event
from tandem.log_lines import last_words, read_log_line


def logged(log_format: Literal["text", "json"]) -> list[str]:
    """An event at each level."""
    root, stream, log = logging.getLogger(), io.StringIO(), logging.getLogger("some.module")
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("info", "decode", stream, log_format=log_format)
        log_event(log, "started", threads=2)
        log_event(log, "node_refused", level=logging.WARNING, reason="its block size is 8")
        log.error("step failed\nfor %s", "ever")
        log_event(log, "stopping", grace_seconds=1.5)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_both_forms_of_a_line_read_the_same(log_format: Literal["text", "json"]) -> None:
    read = [read_log_line(line) for line in logged(log_format)]
    assert [line.level for line in read] == ["info", "warning", "error", "info"]
    assert [line.is_worth_a_look for line in read] == [False, True, True, False]
    assert [line.text.split(" ", 1)[1] for line in read] == [
        "info decode started threads=2",
        'warning decode node_refused reason="its block size is 8"',
        r"error decode step failed\nfor ever",
        "info decode stopping grace_seconds=1.5",
    ]


@pytest.mark.parametrize("line", ["", "{", "{}", '{"level": 3}', "{'level': 'error'}", "2026 error", "error"])
def test_what_no_logger_wrote_is_taken_as_it_is(line: str) -> None:
    read = read_log_line(line)
    assert (read.level, read.text, read.is_worth_a_look) == (None, line, False)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_error_counts_unless_something_was_written_after_the_log(
    log_format: Literal["text", "json"],
) -> None:
    lines = logged(log_format)
    [error] = last_words(lines)
    assert error.endswith(r" error decode step failed\nfor ever")
    assert last_words([*lines, "tandem decode: out of memory", ""]) == ["tandem decode: out of memory"]
    assert last_words([*lines, "odd", *lines]) == [error], "what was written before the log went on"
    assert last_words(lines[:2]) == last_words([]) == [], "no word of why"


def test_of_a_traceback_only_the_error_is_shown() -> None:
    program = """
import sys
def fail(depth):
    if depth == 0:
        raise RuntimeError("cannot load:\\n\\tone\\n\\ttwo\\n\\tthree")
    fail(depth - 1)
try:
    fail(30)
except RuntimeError:
    fail(50)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = result.stderr.splitlines()
    expected = ["RuntimeError: cannot load:", "\tone", "\ttwo"]
    assert last_words([*logged("json"), *lines]) == expected
    assert last_words(lines[-10:]) == expected, "its head may be lost"


def test_a_few_lines_at_most_and_none_too_long() -> None:
    assert last_words([f"line {i}" for i in range(9)]) == ["line 6", "line 7", "line 8"]
    [cut] = last_words(["x" * 5000])
    assert len(cut) < 320
