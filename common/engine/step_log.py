"""The file that `--record-steps` writes: a header, then one line of JSON for each engine step; and its reader.

Steps are handed over by the engine's thread and written by a thread of the recorder's own, so that a slow disk delays
no step. A process that is killed loses what it had not written, at most a second, and perhaps the end of a line.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from common.engine.step_record import StepRecord
from common.errors import ConfigError

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 5.0
FORMAT_VERSION: Final = 1


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a step log: whose steps these are, and the limits that they kept."""

    format: Literal["tandem-steps"] = "tandem-steps"
    version: int = FORMAT_VERSION
    role: str
    node: str
    model: str
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int


class StepRecorder:
    """Writes steps into a file, from construction to `close`; give it to `Engine.observe_steps`.

    Raises ConfigError when the file cannot be written at the start. When it cannot later (a full disk), that is logged
    once, recording ends and the engine goes on.
    """

    def __init__(self, path: Path, header: StepLogHeader) -> None:
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._pending: deque[StepRecord] = deque()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._file = _create(path, self._encode(header) + b"\n")
        self._thread = threading.Thread(target=self._run, name="step-recorder", daemon=True)
        self._thread.start()

    def __call__(self, record: StepRecord) -> None:
        """From the engine's thread; does not wait for the disk."""
        if not self._has_failed:
            self._pending.append(record)

    def close(self) -> None:
        """Writes what is left. No step may follow."""
        self._is_closing.set()
        self._thread.join(CLOSE_SECONDS)  # a file that takes nothing keeps no process from ending

    def _run(self) -> None:
        with self._file as file:
            while not self._has_failed and not self._is_closing.wait(FLUSH_SECONDS):
                self._write(file)
            if not self._has_failed:
                self._write(file)

    def _write(self, file: BinaryIO) -> None:
        records = [self._pending.popleft() for _ in range(len(self._pending))]
        if not records:
            return
        try:
            _write_all(file, b"".join(self._encode(record) + b"\n" for record in records))
        except OSError as error:
            self._has_failed = True
            self._pending.clear()
            log.error("steps are recorded no more: cannot write %s: %s", self._path, error.strerror)


def check_can_record(path: Path) -> None:
    """Raises ConfigError when steps cannot be written there. Changes nothing of a file that is there."""
    exists = path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
        if not exists:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _create(path: Path, first_line: bytes) -> BinaryIO:
    try:
        with ExitStack() as on_error:
            # NONBLOCK: a pipe without a reader, or whose reader stands still, is an error and nobody waits for it
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            file = on_error.enter_context(os.fdopen(descriptor, "wb", buffering=0))
            _write_all(file, first_line)
            on_error.pop_all()
            return file
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--record-steps is {path}, which cannot be written: {error.strerror};"
        " name a file in a folder that exists and has room"
    )


def _write_all(file: BinaryIO, data: bytes) -> None:
    """An unbuffered write may take a part only, before it says that the disk is full."""
    rest = memoryview(data)
    while rest:
        num_written = file.write(rest)
        if num_written is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[num_written:]


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepLog:
    header: StepLogHeader
    records: list[StepRecord]


def read_step_log(path: Path) -> StepLog:
    """Raises ConfigError when there is no such file or it is no step log. A cut last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        near = sorted(map(str, path.parent.glob(f"{path.stem}.*{path.suffix}")))
        hint = f"; there are {', '.join(near)}" if near else ""  # as `tandem serve` names them
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from None
    if lines == [b""]:
        raise ConfigError(f"{path} is empty, a step log has a header at least; is it the file of --record-steps?")
    header = _decode_header(path, lines[0])
    decoder = msgspec.json.Decoder(StepRecord)
    records = []
    for number, line in enumerate(lines[1:-1], 2):  # what follows the last newline is nothing, or a line that was cut
        try:
            records.append(decoder.decode(line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is no step: {error}") from None
    return StepLog(header, records)


def _decode_header(path: Path, line: bytes) -> StepLogHeader:
    try:
        header = msgspec.json.decode(line, type=StepLogHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{path} is no step log: its first line is not the header --record-steps writes") from None
    if header.version != FORMAT_VERSION:
        raise ConfigError(f"{path} is a step log of version {header.version}, must be {FORMAT_VERSION}")
    return header
