"""Which endpoints flags may name: what ZMQ would misread, or take and never reach, is refused with the reason."""

from __future__ import annotations

import pytest

from common.endpoints import check_bound, check_bound_host, check_dialled

BOTH = ["tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://localhost:80", "ipc:///run/x", "ipc://x"]
TO_BIND = ["tcp://*:5", "tcp://0.0.0.0:0", "tcp://127.0.0.1:*", "tcp://lo:0", "tcp://[::]:0", "ipc://*"]
TO_DIAL = ["tcp://proxy:8100", "tcp://a-b.example.org:5"]


@pytest.mark.parametrize("endpoint", BOTH)
def test_usual_ones_are_taken_as_they_are(endpoint: str) -> None:
    assert check_bound(endpoint) == check_dialled(endpoint) == endpoint


def test_some_are_good_for_one_end_only() -> None:
    assert [check_bound(endpoint) for endpoint in TO_BIND] == TO_BIND
    assert [check_dialled(endpoint) for endpoint in TO_DIAL] == TO_DIAL
    for endpoint in ("tcp://*:5", "tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
        with pytest.raises(ValueError, match=r"'.*' has the (host|port) '[*0]'"):
            check_dialled(endpoint)
    for endpoint in TO_DIAL:
        with pytest.raises(ValueError, match="is no address to listen at"):
            check_bound(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://[::1]", "has no port"),
        ("tcp://:5", "has no host"),
        ("tcp://", "has no host"),
        ("tcp://[]:5", "has no host"),
        ("tcp://127.0.0.1:", "has the port ''"),
        ("tcp://127.0.0.1:x", "has the port 'x'"),
        ("tcp://127.0.0.1:99999", "has the port '99999', must be a number from . to 65535"),
        ("tcp://127.0.0.1:65536", "has the port"),
        ("tcp://127.0.0.1:-1", "has the port"),
        ("tcp://127.0.0.1: 5", "has the port"),
        ("tcp://127.0.0.1:" + "1" * 9999, "has the port"),
        ("tcp://127.0.0.1:\N{FULLWIDTH DIGIT FIVE}", "has the port"),
        ("tcp://127.0.0.1:0;10.0.0.1:5", "has the port"),  # from;to
        ("tcp://::1:5", "has no host"),  # without brackets
        ("tcp://a b:5", "is no endpoint"),
        ("tcp://a/b:5", "is no endpoint"),
        ("127.0.0.1:5", "is no endpoint"),
        ("http://127.0.0.1:5", "is no endpoint"),
        ("inproc://x", "is no endpoint"),  # only within a process
        ("ipc://", "a path of 0 bytes"),
        ("ipc:///" + "x" * 107, "a path of 108 bytes, must have 1 to 107"),
    ],
)
def test_what_is_wrong_is_said(endpoint: str, reason: str) -> None:
    for check in (check_bound, check_dialled):
        with pytest.raises(ValueError, match=reason):
            check(endpoint)


def test_names_are_not_looked_up_to_listen_at() -> None:
    for host in ("", "nohost", "example.org", "127.0.0.1:5", "10.0.0.0.1"):
        with pytest.raises(ValueError, match="must be an IP address of this machine"):
            check_bound_host(host)
