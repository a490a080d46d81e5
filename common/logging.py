"""Log lines of every process: one line an event, `key=value` fields, and never the text of a prompt or an answer.

    2026-01-31T12:00:00.123 info proxy request_finished request_id=cmpl-1f reason=stop output_tokens=12
    {"time": "2026-01-31T12:00:00.123", "level": "info", "process": "proxy", "event": "request_finished", ...}

Modules keep using the standard library's loggers; `configure_logging` sets level and form, `log_event` writes fields.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import traceback
from datetime import datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MAX_VALUE_LENGTH = 500
_MAX_KINDS = 64


def parse_levels(text: str) -> dict[str, int]:
    """The least severe level by logger name, "" for all others: "info", or "info,kvtransfer=debug,proxy.sse=error".

    Raises ValueError naming the part that is wrong and the choices.
    """
    levels: dict[str, int] = {"": logging.INFO}
    for part in text.split(","):
        package, equals, level = (word.strip() for word in part.rpartition("="))
        if level not in _LEVELS:
            raise ValueError(f"has the level {level!r}, must be one of {', '.join(_LEVELS)}")
        if equals and not _PACKAGE.fullmatch(package):
            raise ValueError(f"has the package {package!r}, must be a name such as kvtransfer or proxy.sse")
        levels[package] = _LEVELS[level]
    return levels


def configure_logging(
    levels: str, process: str, stream: TextIO | None = None, *, log_format: LogFormat = "text"
) -> None:
    """Sends the log lines of this process to `stream` (standard error), marked with `process` (proxy, decode, ...).

    levels: as for `parse_levels`, whose ValueError it raises.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, level in parse_levels(levels).items():
        logging.getLogger(name).setLevel(level)


def say_why_it_ends(process: str, message: str, log_format: LogFormat) -> None:
    """The last line of a process that cannot go on, for the person at the terminal. Among JSON lines it is one, too."""
    if log_format == "json":
        logging.getLogger(process).error("%s", message)
    else:
        print(f"tandem {process}: {message}", file=sys.stderr)


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """One line for one event. Fields that are None are left out."""
    if logger.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, "%s", _Event(event, known))


class FailureLog:
    """Logs a failure that repeats at most once in `interval_seconds`, with how often it came in between.

    Whatever somebody outside can cause again and again goes through one, or they could fill the disk. It keeps count of
    `_MAX_KINDS` kinds, all others are one.
    """

    def __init__(self, logger: logging.Logger, interval_seconds: float = 30.0) -> None:
        self._logger = logger
        self._interval_seconds = interval_seconds
        self._next_at: dict[str, float] = {}
        self._num_untold: dict[str, int] = {}

    def note(self, now: float, text: str, *, kind: str | None = None) -> None:
        """kind: what counts as the same failure; the text if None. A text that a peer has a say in needs one: it could
        be another each time."""
        num_untold = self.due(now, text if kind is None else kind)
        if num_untold is not None:
            again = f" ({num_untold} more times since the last such line)" if num_untold else ""
            self._logger.warning("%s%s", text, again)

    def due(self, now: float, kind: str) -> int | None:
        """For who logs it himself: how often it came since the last time, or None when it is not to be said now."""
        if kind not in self._next_at and len(self._next_at) >= _MAX_KINDS:
            kind = ""
        if now < self._next_at.get(kind, now):
            self._num_untold[kind] += 1
            return None
        num_untold = self._num_untold.get(kind, 0)
        self._next_at[kind], self._num_untold[kind] = now + self._interval_seconds, 0
        return num_untold


class _Event:
    """The argument of a log record: text when it is asked for, fields for whoever knows it."""

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={_quoted(value)}" for name, value in self.fields.items())])


class LineFormatter(logging.Formatter):
    """Keeps every record on one line, so that lines of several processes can be mixed and still be told apart.

    Of an exception it writes the type and the places, not the message: messages may quote what a user sent.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n")
        error = "".join(f" {name}={_quoted(value)}" for name, value in _error_fields(record).items())
        return f"{_time(record)} {record.levelname.lower()} {self._process} {message}{error}"


class JsonFormatter(logging.Formatter):
    """The same as JSON objects: an event's fields are members, what is prose stands under `message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
        }
        return json.dumps({**head, **_body(record), **_error_fields(record)}, ensure_ascii=False, default=_cut)


def _body(record: logging.LogRecord) -> dict[str, Any]:
    event = record.args[0] if isinstance(record.args, tuple) and len(record.args) == 1 else None
    if not isinstance(event, _Event):
        return {"message": record.getMessage()}
    return {"event": event.name, **{name: _member(value) for name, value in event.fields.items()}}


def _member(value: object) -> object:
    """Numbers and truth values as they are; what JSON has no number for, and all else, as text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _cut(value)


def _cut(value: object) -> str:
    return str(value)[:_MAX_VALUE_LENGTH]


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")


def _error_fields(record: logging.LogRecord) -> dict[str, str]:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return {}
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}:{frame.name}" for frame in reversed(frames)]
    return {"error": type(error).__name__, "at": " < ".join(places)}


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = _cut(value)
    is_plain = text.isprintable() and text and not set(text) & set(" =\"'\\")
    return text if is_plain else json.dumps(text, ensure_ascii=False)
