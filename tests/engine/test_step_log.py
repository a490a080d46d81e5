"""Recording steps into a file and reading them back: whole, cut, on a full disk; and a real engine's records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.config import parse
from common.engine.engine import Engine
from common.engine.step_log import StepLogHeader, StepRecorder, check_can_record, read_step_log
from common.engine.step_observers import observed_steps
from common.engine.step_record import StepRecord
from common.errors import ConfigError
from common.metrics import Metrics
from common.request import Request
from decode_node.config import DecodeConfig

HEADER = StepLogHeader(
    role="decode", node="n", model="tiny", block_size=8, num_blocks=99, max_num_batched_tokens=32, max_num_seqs=16
)


@pytest.fixture
def records(make_engine: Callable[..., Engine], make_request: Callable[..., Request]) -> list[StepRecord]:
    """Those of three requests of 40 tokens and 3 outputs, in steps of at most 32 tokens."""
    found: list[StepRecord] = []
    engine = make_engine()
    engine.observe_steps(found.append)
    for _ in range(3):
        engine.add(make_request(40))
    while engine.scheduler.requests:
        engine.step()
    return found


def test_an_engine_tells_what_each_step_did(records: list[StepRecord]) -> None:
    assert [record.step for record in records] == list(range(records[0].step, records[0].step + len(records)))
    assert sum(record.num_outputs for record in records) == 9
    assert sum(record.num_prefill_tokens + record.num_decode_tokens for record in records) == 3 * (40 + 2)
    assert all(record.num_prefill_tokens + record.num_decode_tokens <= 32 for record in records)
    assert records[-1].num_used_blocks == 0
    assert records[-1].num_blocks == 99


def test_what_was_written_is_read_back(tmp_path: Path, records: list[StepRecord]) -> None:
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, HEADER)
    for record in records:
        recorder(record)
    recorder.close()
    log = read_step_log(path)
    assert log.header == HEADER
    assert log.records == records


def test_a_line_cut_by_a_kill_costs_that_line_only(tmp_path: Path, records: list[StepRecord]) -> None:
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, HEADER)
    for record in records:
        recorder(record)
    recorder.close()
    whole = path.read_bytes()
    last = len(whole.splitlines()[-1]) + 1
    for num_cut in (1, 2, last // 2, last - 1):
        path.write_bytes(whole[:-num_cut])
        assert read_step_log(path).records == records[:-1], num_cut


def test_a_failing_write_ends_the_recording_and_nothing_else(
    tmp_path: Path, records: list[StepRecord], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = StepRecorder(path, HEADER)
    os.close(reader)  # from now on no write succeeds
    for record in records:
        recorder(record)
    recorder.close()
    assert caplog.text.count(f"steps are recorded no more: cannot write {path}: Broken pipe") == 1
    recorder(records[0])


def test_a_pipe_that_nobody_reads_is_refused_and_one_that_stands_still_holds_up_nobody(
    tmp_path: Path, records: list[StepRecord], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        StepRecorder(path, HEADER)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = StepRecorder(path, HEADER)
    for record in records * 1000:  # more than a pipe holds
        recorder(record)
    recorder.close()
    assert "steps are recorded no more" in caplog.text
    os.close(reader)


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-steps is .*/none/steps.jsonl, which cannot be written: No such"):
        StepRecorder(tmp_path / "none" / "steps.jsonl", HEADER)
    with pytest.raises(ConfigError, match="/dev/full, which cannot be written: No space left"):
        StepRecorder(Path("/dev/full"), HEADER)


def test_whether_it_can_be_written_is_known_beforehand_and_leaves_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    check_can_record(file)
    assert not file.exists()
    file.write_text("of an earlier run")
    check_can_record(file)
    assert file.read_text() == "of an earlier run"
    for path in (tmp_path, tmp_path / "none" / "steps.jsonl"):
        with pytest.raises(ConfigError, match=f"--record-steps is {path}, which cannot be written"):
            check_can_record(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"some text\n", "is no step log"),
        (b"[" * 100_000 + b"\n", "is no step log"),
        (b"\xff\xfe\n", "is no step log"),
        (b'{"step": 1}\n', "is no step log"),
        (msgspec.json.encode(msgspec.structs.replace(HEADER, version=9)) + b"\n", "of version 9, must be 1"),
        (msgspec.json.encode(HEADER) + b"\n{}\n{}\n", "line 2 is no step: Object missing required field"),
    ],
)
def test_what_is_no_step_log_is_refused_with_the_reason(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        read_step_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/steps.jsonl: No such file"):
        read_step_log(tmp_path / "steps.jsonl")


def test_a_node_observes_its_steps_and_records_them(
    tmp_path: Path, make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    path = tmp_path / "steps.jsonl"
    flags = parse(DecodeConfig, ["--record-steps", str(path), "--model", "tiny"])
    registry = CollectorRegistry()
    engine = make_engine()
    with observed_steps(engine, flags, Metrics("tiny", registry), "node-1", "decode"):
        engine.add(make_request(40))
        while engine.scheduler.requests:
            engine.step()
    log = read_step_log(path)
    assert (log.header.role, log.header.node, log.header.model) == ("decode", "node-1", "tiny")
    assert (log.header.block_size, log.header.num_blocks, log.header.max_num_batched_tokens) == (8, 99, 32)
    labels = {"model_name": "tiny", "node": "node-1", "role": "decode"}
    assert registry.get_sample_value("vllm:iteration_tokens_total_sum", labels) == 42
    assert registry.get_sample_value("vllm:iteration_tokens_total_count", labels) == len(log.records)
    assert registry.get_sample_value("tandem:step_seconds_count", labels) == len(log.records)
