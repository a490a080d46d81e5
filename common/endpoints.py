"""What an endpoint of a flag may look like, to listen at or to dial: tcp://HOST:PORT or ipc://PATH.

ZMQ itself would take port 99999 for 34463, and say nothing of an address that it can never reach. Who may use which
address is for plane_security.py to know. Opens nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket

_TCP = re.compile(r"tcp://(\[[^\[\];/\s]*\]|[^\[\]:;/\s]*)(?::(.*))?")
_MAX_PORT = 65535
_MAX_PATH_BYTES = 107  # of a socket's name in Linux


def split_endpoints(value: object) -> object:
    """'a,b' or ['a,b', 'c'] as a list of single endpoints; anything else is left for validation to refuse."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [part.strip() for item in value for part in str(item).split(",") if part.strip()]


def check_dialled(endpoint: str) -> str:
    """Raises ValueError for what no peer can be reached at."""
    if (address := _tcp_address(endpoint)) is not None:
        host, port = address
        _check_port(endpoint, port, lowest=1)
        if host == "*":
            raise ValueError(f"{endpoint!r} has the host '*', which nobody can dial; name a host")
    return endpoint


def check_bound(endpoint: str) -> str:
    """Raises ValueError for what no socket can listen at. Port 0 or * takes any free one."""
    if (address := _tcp_address(endpoint)) is not None:
        host, port = address
        if port != "*":
            _check_port(endpoint, port, lowest=0)
        check_bound_host(host)
    return endpoint


def check_bound_host(host: str) -> str:
    """Raises ValueError for a name that stands for no address of this machine, which ZMQ would not look up."""
    if host in ("*", "localhost") or _is_ip_address(host) or host in (name for _, name in socket.if_nameindex()):
        return host
    raise ValueError(
        f"{host!r} is no address to listen at, must be an IP address of this machine, 0.0.0.0 for every one, localhost"
        " or the name of a network interface"
    )


def _tcp_address(endpoint: str) -> tuple[str, str] | None:
    """(host, port) as written, the host without brackets; None for an ipc endpoint."""
    if endpoint.startswith("ipc://"):
        _check_path(endpoint)
        return None
    found = _TCP.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is no endpoint, must look like tcp://HOST:PORT or ipc://PATH")
    host, port = found[1].strip("[]"), found[2]
    if not host:
        raise ValueError(f"{endpoint!r} has no host, must look like tcp://HOST:PORT")
    if port is None:
        raise ValueError(f"{endpoint!r} has no port, must look like tcp://HOST:PORT")
    return host, port


def _check_path(endpoint: str) -> None:
    length = len(endpoint.removeprefix("ipc://").encode())
    if not 1 <= length <= _MAX_PATH_BYTES:
        raise ValueError(f"{endpoint!r} has a path of {length} bytes, must have 1 to {_MAX_PATH_BYTES}")


def _check_port(endpoint: str, port: str, *, lowest: int) -> None:
    is_number = port.isascii() and port.isdecimal() and len(port) <= len(str(_MAX_PORT))
    if not is_number or not lowest <= int(port) <= _MAX_PORT:
        raise ValueError(f"{endpoint!r} has the port {port!r}, must be a number from {lowest} to {_MAX_PORT}")


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
