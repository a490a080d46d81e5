"""Outputs kept for a proxy that may ask again, and forgotten once it has them."""

from __future__ import annotations

from common.messages import LiveRequest, RequestOutput
from decode_node.output_log import OutputLog


def output(index: int, finish: str | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", leg=1, index=index, token_ids=[index], finish_reason=finish)


def logged(num_outputs: int, *, finished: bool = False) -> OutputLog:
    log = OutputLog(keep_seconds=10.0)
    log.open("p", "r", 1, [0])
    for index in range(num_outputs):
        is_last = finished and index == num_outputs - 1
        log.record(output(index, "stop" if is_last else None), sequence=index + 1, now=0.0)
    return log


def test_outputs_from_an_index_on() -> None:
    assert [o.index for o in logged(5).outputs_from("r", 1, 0, 3)] == [3, 4]


def test_finish_reason_is_resent_even_when_no_token_is_missing() -> None:
    assert [o.finish_reason for o in logged(3, finished=True).outputs_from("r", 1, 0, 3)] == ["stop"]


def test_another_leg_has_nothing_to_resend() -> None:
    assert logged(3).outputs_from("r", 2, 0, 0) == []


def test_live_requests_name_the_leg() -> None:
    assert logged(3).live("p") == [LiveRequest("r", 1)]
    assert logged(3).live("other") == []


def test_unfinished_request_is_kept_whatever_is_acknowledged() -> None:
    log = logged(3)
    log.acknowledge("p", 99, now=0.0)
    assert log.live("p")


def test_finished_request_is_forgotten_when_its_last_message_is_acknowledged() -> None:
    log = logged(3, finished=True)
    log.acknowledge("p", 2, now=0.0)
    assert log.live("p")
    log.acknowledge("p", 3, now=0.0)
    assert not log.live("p")


def test_finished_request_that_nobody_acknowledges_is_forgotten_after_the_lease() -> None:
    log = logged(3, finished=True)
    log.acknowledge("p", 0, now=10.1)
    assert not log.live("p")


def test_a_lost_proxy_takes_its_requests_along() -> None:
    log = logged(3)
    assert log.forget_proxy("p") == ["r"]
    assert not log.live("p")


# --- several choices ------------------------------------------------------------------------------------------------


def two_choices() -> OutputLog:
    """Outputs 0 of both in message 1, then choice 1 ends in message 2; choice 0 goes on."""
    log = OutputLog(keep_seconds=10.0)
    log.open("p", "r", 1, [0, 1])
    for choice, index, finish, sequence in ((0, 0, None, 1), (1, 0, None, 1), (1, 1, "stop", 2)):
        log.record(
            RequestOutput(request_id="r", leg=1, choice=choice, index=index, token_ids=[9], finish_reason=finish),
            sequence=sequence,
            now=0.0,
        )
    return log


def kept(log: OutputLog, choice: int) -> list[int]:
    return [output.index for output in log.outputs_from("r", 1, choice, 0)]


def test_choices_are_kept_apart() -> None:
    assert (kept(two_choices(), 0), kept(two_choices(), 1)) == ([0], [0, 1])


def test_a_choice_that_has_ended_is_kept_while_others_go_on() -> None:
    log = two_choices()
    log.acknowledge("p", 99, now=99.0)
    assert kept(log, 1) == [0, 1]


def test_the_last_choice_to_end_says_what_must_be_acknowledged() -> None:
    log = two_choices()
    log.record(RequestOutput(request_id="r", leg=1, choice=0, index=1, finish_reason="length"), sequence=5, now=0.0)
    log.acknowledge("p", 4, now=0.0)
    assert log.live("p")
    log.acknowledge("p", 5, now=0.0)
    assert not log.live("p")


def test_outputs_after_a_choices_end_are_not_kept() -> None:
    log = two_choices()
    log.record(RequestOutput(request_id="r", leg=1, choice=1, index=2, token_ids=[9]), sequence=3, now=0.0)
    log.record(RequestOutput(request_id="r", leg=1, choice=7, index=0, token_ids=[9]), sequence=3, now=0.0)
    assert (kept(log, 1), kept(log, 7)) == ([0, 1], [])


def test_a_closed_choice_is_forgotten_and_the_other_waits_for_its_acknowledgement() -> None:
    log = two_choices()
    log.close_choice("r", 0)
    assert (kept(log, 0), kept(log, 1)) == ([], [0, 1])
    log.acknowledge("p", 1, now=0.0)
    assert log.live("p")
    log.acknowledge("p", 2, now=0.0)
    assert not log.live("p")


def test_the_last_choice_closed_forgets_the_request() -> None:
    log = two_choices()
    log.close_choice("r", 1)
    assert log.live("p")
    log.close_choice("r", 0)
    assert not log.live("p")
    log.close_choice("r", 0)
