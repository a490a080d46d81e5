"""Log lines of our processes as a person reads them, whichever form they have, and those that say why one ended.

    2026-01-31T12:00:00.123 error decode step_failed reason=...
    {"time": "2026-01-31T12:00:00.123", "level": "error", ...}
    tandem decode: cannot ...

The first two are what common/logging.py writes; the last is what a process says when it gives up, or a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, Final

import msgspec

_TEXT_FORM: Final = re.compile(r"\d{4}-\d\d-\d\dT\S+ (debug|info|warning|error|critical) ")
_SERIOUS: Final = {"error", "critical"}
_HEAD: Final = ("time", "level", "process", "event", "message")
_MAX_LINES: Final = 3
_MAX_LENGTH: Final = 300


@dataclass(frozen=True)
class LogLine:
    """level: None for what no logger wrote."""

    level: str | None
    text: str

    @property
    def is_worth_a_look(self) -> bool:
        return self.level == "warning" or self.level in _SERIOUS


def read_log_line(line: str) -> LogLine:
    if found := _TEXT_FORM.match(line):
        return LogLine(found[1], line)
    if line.startswith("{"):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return LogLine(None, line)
        if isinstance(level := fields.get("level"), str):
            return LogLine(level, _as_text(fields))
    return LogLine(None, line)


def last_words(lines: Iterable[str]) -> list[str]:
    """The few lines that say why a process ended, the last of its output given: what it wrote past its logger at the
    end, without the places of a traceback; or else its last error; or nothing."""
    read = [read_log_line(line) for line in lines if line.strip()]
    num_logged = max((number for number, line in enumerate(read, 1) if line.level is not None), default=0)
    words = _essential([line.text for line in read[num_logged:]])
    return [_cut(line) for line in words or [line.text for line in read if line.level in _SERIOUS][-1:]]


def _essential(lines: list[str]) -> list[str]:
    """The end, or of a traceback what stands behind its last place."""
    places = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not places:
        return lines[-_MAX_LINES:]
    behind = dropwhile(lambda line: line.startswith("    "), lines[places[-1] + 1 :])
    return list(behind)[:_MAX_LINES]


def _as_text(fields: dict[str, Any]) -> str:
    """In the order of the other form; `logger` is not part of that."""
    head = [str(fields[name]) for name in _HEAD if name in fields]
    rest = [f"{name}={_quoted(value)}" for name, value in fields.items() if name not in (*_HEAD, "logger")]
    return " ".join([*head, *rest]).replace("\n", "\\n")


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} ..."
