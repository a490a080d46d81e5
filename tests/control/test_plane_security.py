"""Which addresses may be used without a secret, and how often a failure is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from common.cluster_secret import ClusterSecret, new_secret_text
from common.config import NodeFlags
from common.control import ControlClient
from common.errors import ConfigError
from common.node_process import load_node_security
from common.plane_security import PlaneSecurity, is_local, load_cluster_security

HERE = ["tcp://127.0.0.1:0", "tcp://127.0.0.2:5", "tcp://[::1]:5", "tcp://localhost:*", "ipc:///run/x", "inproc://x"]
BEYOND = [
    "tcp://0.0.0.0:5",
    "tcp://*:5",
    "tcp://10.0.0.1:5",
    "tcp://[::]:5",
    "tcp://example.org:5",
    "tcp://localhost.example.org:5",
    "tcp://127.0.0.1:0;10.0.0.1:5",  # from, to
]


def test_this_machine_needs_no_secret() -> None:
    for endpoint in HERE:
        assert is_local(endpoint)
        PlaneSecurity("control").check(endpoint)


@pytest.mark.parametrize("endpoint", BEYOND)
def test_other_machines_need_a_secret_or_a_word(endpoint: str) -> None:
    assert not is_local(endpoint)
    with pytest.raises(ConfigError) as caught:
        PlaneSecurity("fetch").check(endpoint)
    for words in (f"fetch endpoint {endpoint}", "--cluster-secret-file", "tandem keygen", "--insecure"):
        assert words in caught.value.message
    PlaneSecurity("fetch", is_insecure=True).check(endpoint)
    PlaneSecurity("fetch", ClusterSecret(new_secret_text()).plane_keys("fetch")).check(endpoint)


def test_a_node_is_refused_before_it_dials(tmp_path: Path) -> None:
    far = NodeFlags(proxy=("tcp://127.0.0.1:1", "tcp://proxy:8100"))
    with pytest.raises(ConfigError, match="tcp://proxy:8100"):
        load_node_security(far)
    with pytest.raises(ConfigError, match="tcp://proxy:8100"):
        ControlClient("node", far.proxy, handler=None)
    (tmp_path / "secret").write_text(new_secret_text())
    security = load_node_security(far.model_copy(update={"cluster_secret_file": tmp_path / "secret"}))
    assert security.control.keys != security.fetch.keys
    assert None not in (security.control.keys, security.fetch.keys)


def test_insecure_is_said(caplog: pytest.LogCaptureFixture) -> None:
    load_node_security(NodeFlags())
    assert "--insecure" not in caplog.text
    security = load_cluster_security(NodeFlags(insecure=True))
    assert "not encrypted" in caplog.text
    security.fetch.check("tcp://0.0.0.0:1")


def test_other_protocols_are_not_taken_for_another_secret() -> None:
    event, value = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_MALFORMED_COMMAND_READY)
    security = PlaneSecurity("control", ClusterSecret(new_secret_text()).plane_keys("control"))
    assert "the address right" in security.dialling_failure(event, value, "the proxy at tcp://x:1")
    assert "does not speak this protocol" in security.serving_failure(event, value, "tcp://x:1")
