"""What endpoints say: schemes, what peers are to dial, which one a client tries first. Opens nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from urllib.parse import urlsplit

from common.errors import ConfigError
from common.plane_security import tcp_host

_WILDCARDS = {"*", "0.0.0.0", "::"}


def scheme_of(endpoint: str) -> str:
    scheme, separator, _ = endpoint.partition("://")
    if not separator:
        raise ConfigError(f"fetch endpoint {endpoint!r} has no scheme, such as tcp://127.0.0.1:0 or ipc://PATH")
    return scheme


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_wildcard(host: str) -> bool:
    return host in _WILDCARDS


def advertised(bound: str, host: str | None) -> str:
    """What peers are to dial. `host` replaces the bound one; a wildcard has to be replaced."""
    if scheme_of(bound) != "tcp":
        return bound
    if host is None:
        if is_wildcard(tcp_host(bound)):
            raise ConfigError(f"fetch endpoint {bound} is bound to every address; say which host peers are to dial")
        return bound
    port = urlsplit(bound.replace("*", "0.0.0.0", 1)).port
    assert port is not None  # of an address that is bound
    return tcp_endpoint(host, port)


def in_dialing_order(endpoints: Sequence[str]) -> list[str]:
    """The ones worth a try, best first: a socket file that is there means the same host."""
    reachable = [endpoint for endpoint in endpoints if not endpoint.startswith("ipc://") or _is_socket(endpoint[6:])]
    return sorted(reachable, key=lambda endpoint: not endpoint.startswith("ipc://"))


def _is_socket(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    # Another user's may be of somebody who took the name of a server that is gone.
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid() and os.access(path, os.R_OK | os.W_OK)
