"""What protects the ZMQ sockets between the processes of a cluster, one plane at a time.

With a cluster secret: CURVE, both ways. A server takes only clients with the client key, which ZMQ asks its ZAP handler
(in a thread of its own) before anything that the client sends is read. Without one: only addresses of this machine,
unless `--insecure`. Says what a failed handshake means; knows no messages.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.cluster_secret import Plane, PlaneKeys, load_cluster_secret
from common.config import ClusterFlags
from common.errors import ConfigError

log = logging.getLogger(__name__)

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
CURVE_OVERHEAD_BYTES = 33
"""What CURVE adds to each part of a message; it counts against ZMQ's MAXMSGSIZE."""

HANDSHAKE_SECONDS = 5.0
"""How long who dials may take to say who he is; until then his connection costs a file descriptor."""

_BOTH_NEED_IT = "both must be started with the same --cluster-secret-file"


@dataclass(frozen=True)
class PlaneSecurity:
    """keys: None without a cluster secret. is_insecure: then addresses beyond this machine are allowed all the same."""

    plane: Plane
    keys: PlaneKeys | None = None
    is_insecure: bool = False

    def check(self, endpoint: str) -> None:
        """Raises ConfigError for an address that other machines share, if nothing protects what goes over it."""
        if self.keys is None and not self.is_insecure and not is_local(endpoint):
            raise ConfigError(
                f"{self.plane} endpoint {endpoint} is beyond this machine, and without a cluster secret the connection "
                "would be open to anyone and not encrypted; start every process with the same --cluster-secret-file "
                "(`tandem keygen FILE` makes one), or with --insecure on a network that you trust"
            )

    def start_allow_list(self, context: zmq.Context[Any]) -> ThreadAuthenticator | None:
        """Must come before the first `secure_server` socket of the context is bound; `stop` it before `term`.

        A server without it would refuse everybody (ZAP_ENFORCE_DOMAIN), not let everybody in.
        """
        if self.keys is None:
            return None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(self._domain, _AllowList(self.keys.client.public))
        return authenticator

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """For the binds that follow; what is bound already stays as it is."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self.keys is not None:
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.server.secret)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, self._domain)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        if self.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.server.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.client.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.client.secret)

    @property
    def _domain(self) -> str:
        return f"tandem-{self.plane}"

    # --- what a failed handshake means: ZMQ tells the two sides different halves of it

    def dialling_failure(self, event: int, value: int, server: str) -> str:
        """server: whom we dialled, such as "the proxy at tcp://proxy:8100"."""
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self.keys is None:
                return f"{server} demands a cluster secret and this process has none: {_BOTH_NEED_IT}"
            return f"{server} has no cluster secret and this process has one: {_BOTH_NEED_IT}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return f"{server} does not speak this protocol; is the address right?"
        if self.keys is None:
            return f"{server} closed the connection at once; if it has a cluster secret, {_BOTH_NEED_IT}"
        return f"{server} did not accept this process's cluster secret, or has none: {_BOTH_NEED_IT}"

    def serving_failure(self, event: int, value: int, endpoint: str) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            left = f"a peer at {endpoint} left or fell silent during the handshake"
            return f"{left}; if it is one of this cluster, {_BOTH_NEED_IT}"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            has = "without a cluster secret" if self.keys else "with a cluster secret, which this process lacks,"
            return f"a peer {has} was refused at {endpoint}: {_BOTH_NEED_IT}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return f"a peer with another cluster secret was refused at {endpoint}: {_BOTH_NEED_IT}"
        return f"a peer at {endpoint} does not speak this protocol, it was refused"


LOCAL_CONTROL = PlaneSecurity("control")
LOCAL_FETCH = PlaneSecurity("fetch")
"""Nothing but addresses of this machine."""


class _AllowList:
    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public_key)


@dataclass(frozen=True)
class ClusterSecurity:
    """Of one process, on both planes."""

    control: PlaneSecurity
    fetch: PlaneSecurity


def load_cluster_security(flags: ClusterFlags) -> ClusterSecurity:
    """Raises ConfigError when the secret cannot be used."""
    if flags.cluster_secret_file is not None:
        secret = load_cluster_secret(flags.cluster_secret_file)
        return ClusterSecurity(
            PlaneSecurity("control", secret.plane_keys("control")), PlaneSecurity("fetch", secret.plane_keys("fetch"))
        )
    if flags.insecure:
        log.warning("--insecure: connections between processes are not encrypted, and whoever reaches them is let in")
    return ClusterSecurity(
        PlaneSecurity("control", is_insecure=flags.insecure), PlaneSecurity("fetch", is_insecure=flags.insecure)
    )


def is_local(endpoint: str) -> bool:
    """Whether only this machine can be at the other end. Names are not looked up: of them only localhost is local."""
    return not endpoint.startswith("tcp://") or is_loopback(tcp_host(endpoint))


def tcp_host(endpoint: str) -> str:
    """Host of a tcp endpoint, without brackets."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
