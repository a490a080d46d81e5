"""Which transport serves which scheme. Modules are imported when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from common.errors import ConfigError
from common.plane_security import LOCAL_FETCH, PlaneSecurity
from kvtransfer.endpoints import scheme_of
from kvtransfer.transports.base import Transport

TRANSPORTS = {
    "tcp": "kvtransfer.transports.zmq",
    "ipc": "kvtransfer.transports.zmq",
    "loopback": "kvtransfer.transports.loopback",
}
"""Modules, each with a `make_transport(security)`."""


class TransportSet:
    """The transports of one server or client; one of each module, made when first asked for.

    given: by scheme; these are used instead, and stay open when the set is closed. security: of what is made.
    """

    def __init__(self, given: Mapping[str, Transport] | None = None, *, security: PlaneSecurity = LOCAL_FETCH) -> None:
        self._given = dict(given or {})
        self._security = security
        self._made: dict[str, Transport] = {}

    def for_endpoint(self, endpoint: str) -> Transport:
        """Raises ConfigError for a scheme that nothing serves."""
        scheme = scheme_of(endpoint)
        if scheme in self._given:
            return self._given[scheme]
        name = TRANSPORTS.get(scheme)
        if name is None:
            known = ", ".join(sorted(TRANSPORTS))
            raise ConfigError(f"fetch endpoint {endpoint!r} has scheme {scheme!r}, supported are {known}")
        if name not in self._made:
            make: Callable[[PlaneSecurity], Transport] = import_module(name).make_transport
            self._made[name] = make(self._security)
        return self._made[name]

    def group(self, endpoints: Iterable[str]) -> list[tuple[Transport, list[str]]]:
        """Each transport with those of the endpoints that it serves."""
        groups: dict[int, tuple[Transport, list[str]]] = {}
        for endpoint in endpoints:
            transport = self.for_endpoint(endpoint)
            groups.setdefault(id(transport), (transport, []))[1].append(endpoint)
        return list(groups.values())

    def close(self) -> None:
        for transport in self._made.values():
            transport.close()
        self._made.clear()
