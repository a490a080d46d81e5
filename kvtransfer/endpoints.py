"""What endpoints say: schemes, loopback or not, which one a client tries first. Opens nothing."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Sequence
from urllib.parse import urlsplit

from common.errors import ConfigError

_WILDCARDS = {"*", "0.0.0.0", "::"}


def scheme_of(endpoint: str) -> str:
    scheme, separator, _ = endpoint.partition("://")
    if not separator:
        raise ConfigError(f"fetch endpoint {endpoint!r} has no scheme, such as tcp://127.0.0.1:0 or ipc://PATH")
    return scheme


def tcp_host(endpoint: str) -> str:
    """Host of a tcp endpoint, without brackets."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return host.strip("[]")


def require_local(endpoint: str) -> None:
    """Raises ConfigError when other hosts could reach this tcp endpoint."""
    if scheme_of(endpoint) == "tcp" and not _is_loopback(tcp_host(endpoint)):
        raise ConfigError(
            f"fetch endpoint {endpoint} is reachable from other hosts and not encrypted; "
            "bind 127.0.0.1, or allow remote peers explicitly"
        )


def advertised(bound: str, host: str | None) -> str:
    """What peers are to dial. `host` replaces the bound one; a wildcard has to be replaced."""
    if scheme_of(bound) != "tcp":
        return bound
    if host is None:
        if tcp_host(bound) in _WILDCARDS:
            raise ConfigError(f"fetch endpoint {bound} is bound to every address; say which host peers are to dial")
        return bound
    port = urlsplit(bound.replace("*", "0.0.0.0", 1)).port
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def in_dialing_order(endpoints: Sequence[str]) -> list[str]:
    """The ones worth a try, best first: a socket file that is there means the same host."""
    reachable = [endpoint for endpoint in endpoints if not endpoint.startswith("ipc://") or _is_socket(endpoint[6:])]
    return sorted(reachable, key=lambda endpoint: not endpoint.startswith("ipc://"))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_socket(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISSOCK(mode) and os.access(path, os.R_OK | os.W_OK)
