"""Log lines of every process: one line an event, `key=value` fields, and never the text of a prompt or an answer.

    2026-01-31T12:00:00.123 info proxy request_finished request_id=cmpl-1f reason=stop output_tokens=12

Modules keep using the standard library's loggers; `configure_logging` sets their format, `log_event` writes fields.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import datetime
from typing import TextIO

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MAX_VALUE_LENGTH = 500


def configure_logging(level: str, process: str, stream: TextIO | None = None) -> None:
    """Sends the log lines of this process to `stream` (standard error), marked with `process` (proxy, decode, ...)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """One line for one event. Fields that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", format_event(event, fields))


def format_event(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{name}={_quoted(value)}" for name, value in fields.items() if value is not None)])


class LineFormatter(logging.Formatter):
    """Keeps every record on one line, so that lines of several processes can be mixed and still be told apart.

    Of an exception it writes the type and the places, not the message: messages may quote what a user sent.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")
        message = record.getMessage().replace("\n", "\\n")
        error = record.exc_info[1] if record.exc_info else None
        return f"{time} {record.levelname.lower()} {self._process} {message}{_places(error)}"


def _places(error: BaseException | None) -> str:
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}:{frame.name}" for frame in reversed(frames)
    )
    return f" error={type(error).__name__} at={_quoted(places)}"


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)[:_MAX_VALUE_LENGTH]
    is_plain = text.isprintable() and text and not set(text) & set(" =\"'\\")
    return text if is_plain else json.dumps(text, ensure_ascii=False)
