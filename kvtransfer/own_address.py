"""The address of this machine, or container, that peers are told to dial when a server is bound to every address.

Asks the kernel which address a packet would leave from; sends none.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from common.plane_security import is_loopback, tcp_host
from kvtransfer.endpoints import is_wildcard

_FAR_AWAY = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # nobody's (RFC 5737, 3849): the default route


def host_for_peers(bound_host: str, given: str | None, neighbours: Iterable[str]) -> str | None:
    """What stands in for the bound host; None: nothing needs to."""
    if given is None and is_wildcard(bound_host):
        return own_address(neighbours, is_ipv6=":" in bound_host)
    return given


def own_address(neighbours: Iterable[str], *, is_ipv6: bool = False) -> str:
    """neighbours: tcp endpoints that are to be dialled anyway; the way to them tells best which network is meant.

    Then the default route, then what the host's own name stands for. Loopback where there is nothing else.
    """
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    for address in _candidates(neighbours, family):
        if not is_loopback(address):
            return address
    return "::1" if is_ipv6 else "127.0.0.1"


def _candidates(neighbours: Iterable[str], family: socket.AddressFamily) -> Iterator[str]:
    for endpoint in neighbours:
        if endpoint.startswith("tcp://"):
            yield from _leaving_for(tcp_host(endpoint), family)
    yield from _leaving_for(_FAR_AWAY[family], family)
    yield from _addresses_of(socket.gethostname(), family)


def _leaving_for(host: str, family: socket.AddressFamily) -> Iterator[str]:
    for address in _addresses_of(host, family):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            yield str(probe.getsockname()[0])


def _addresses_of(host: str, family: socket.AddressFamily) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, family, socket.SOCK_DGRAM)]
    except OSError:
        return []
