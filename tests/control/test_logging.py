"""Log lines: one line each, as text or JSON, levels by package, and no message of an exception."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from common.logging import FailureLog, LogFormat, configure_logging, log_event, parse_levels, say_why_it_ends

log = logging.getLogger("kvtransfer.link")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    loggers = [logging.getLogger(name) for name in ("", "kvtransfer", "kvtransfer.link", "proxy")]
    saved = [(one, one.handlers[:], one.level) for one in loggers]
    yield io.StringIO()
    for one, handlers, level in saved:
        one.handlers[:] = handlers
        one.setLevel(level)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def say_all(stream: io.StringIO, log_format: LogFormat) -> None:
    configure_logging("info", "decode", stream, log_format=log_format)
    log_event(log, "fetch_ended", request_id="p/1", blocks=3, seconds=0.12345, error=None, reason="a b\nc", ok=True)
    log.warning("%d blocks are\nlost", 7)
    try:
        raise RuntimeError("what a user sent")
    except RuntimeError:
        log.exception("a step failed")


def test_text_lines(stream: io.StringIO) -> None:
    say_all(stream, "text")
    event, prose, failure = (line.split(" ", 1)[1] for line in lines(stream))
    assert event == 'info decode fetch_ended request_id=p/1 blocks=3 seconds=0.1235 reason="a b\\nc" ok=True'
    assert prose == r"warning decode 7 blocks are\nlost"
    assert failure.startswith("error decode a step failed error=RuntimeError at=test_logging.py:")
    assert "what a user sent" not in stream.getvalue()


def test_json_lines(stream: io.StringIO) -> None:
    say_all(stream, "json")
    event, prose, failure = map(json.loads, lines(stream))
    head = {"level": "info", "process": "decode", "logger": "kvtransfer.link"}
    fields = {"request_id": "p/1", "blocks": 3, "seconds": 0.12345, "reason": "a b\nc", "ok": True}
    assert event == {"time": event["time"], **head, "event": "fetch_ended", **fields}
    assert (prose["message"], prose["level"]) == ("7 blocks are\nlost", "warning")
    assert (failure["message"], failure["error"]) == ("a step failed", "RuntimeError")
    assert failure["at"].startswith("test_logging.py:")
    assert "what a user sent" not in stream.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"\xff", {"a": 1}, "x" * 10_000])
def test_what_json_cannot_say_is_text(stream: io.StringIO, value: Any) -> None:
    configure_logging("info", "decode", stream, log_format="json")
    log_event(log, "odd", value=value)
    [line] = lines(stream)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(line, parse_constant=refuse)
    assert found["value"] == str(value)[:500]


def test_levels_by_package(stream: io.StringIO) -> None:
    configure_logging("warning,kvtransfer=debug,kvtransfer.link=error", "decode", stream)
    logging.getLogger("proxy").info("not said")
    logging.getLogger("proxy").warning("said")
    logging.getLogger("kvtransfer.server").debug("said")
    log.warning("not said")
    assert [line.rsplit(" ", 1)[1] for line in lines(stream)] == ["said", "said"]
    assert "not" not in stream.getvalue()


def test_only_packages_named_leaves_the_others_at_info() -> None:
    assert parse_levels("kvtransfer=debug") == {"": logging.INFO, "kvtransfer": logging.DEBUG}


@pytest.mark.parametrize("text", ["loud", "", "info,proxy", "proxy=loud", "proxy=", "info,,debug"])
def test_a_wrong_level_is_named_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of debug, info, warning, error"):
        parse_levels(text)


def test_a_failure_that_repeats_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"), interval_seconds=30.0)
    for now in (0.0, 1.0, 2.0, 29.9):
        failures.note(now, "refused")
    failures.note(2.5, "something else")
    failures.note(30.0, "refused")
    failures.note(70.0, "refused")
    assert [record.message for record in caplog.records] == [
        "refused",
        "something else",
        "refused (3 more times since the last such line)",
        "refused",
    ]


def test_of_one_kind_only_the_first_text_is_said(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"))
    for number in range(5):
        failures.note(0.0, f"nonsense {number}", kind="nonsense")
    assert [record.message for record in caplog.records] == ["nonsense 0"]
    failures.note(30.0, "nonsense 5", kind="nonsense")
    assert caplog.records[-1].message == "nonsense 5 (4 more times since the last such line)"


def test_whoever_makes_up_new_kinds_fills_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"))
    for number in range(1000):
        failures.note(0.0, f"nonsense {number}")
    assert 10 < len(caplog.records) < 100
    assert failures.due(30.0, "yet another") == 1000 - len(caplog.records)


@pytest.mark.parametrize("levels", ["=debug", "info,=debug", "x=y=debug", "a b=debug", ".x=debug", "x.=debug"])
def test_what_is_no_package_is_refused(levels: str) -> None:
    with pytest.raises(ValueError, match=r"has the (package|level) '"):
        parse_levels(levels)


def test_the_last_line_has_the_form_of_the_others(stream: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "decode", stream, log_format="json")
    say_why_it_ends("decode", "no room " * 100, "json")
    line = json.loads(stream.getvalue())
    assert (line["level"], line["process"], line["message"]) == ("error", "decode", "no room " * 100)
    assert not capsys.readouterr().err
    say_why_it_ends("decode", "no room", "text")
    assert capsys.readouterr().err == "tandem decode: no room\n"
