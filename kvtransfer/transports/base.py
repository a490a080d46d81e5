"""What a transport offers to the two ends of the fetch plane: messages of several buffers, whole or not at all.

Nothing here blocks. A message may be lost when a connection is; the session above notices that. Ports and connections
are used by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import zmq

from kvtransfer.frames import Buffer

Waitable = zmq.Socket[bytes] | int
"""Something that a zmq.Poller can wait on: a ZMQ socket or a file descriptor."""


class SendStatus(Enum):
    SENT = "sent"
    FULL = "full"  # try again a little later
    GONE = "gone"  # this peer cannot be reached any more


class ServerPort(Protocol):
    """endpoints: those really bound, where port 0 and wildcard names have become what they are."""

    endpoints: list[str]

    def waitables(self) -> list[Waitable]: ...

    def send(self, peer: bytes, parts: Sequence[Buffer]) -> SendStatus:
        """The buffers may be changed as soon as this returns."""
        ...

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message and who sent it; None when there is none now."""
        ...

    def close(self, flush_seconds: float = 0.0) -> None:
        """What was sent and has not left yet is given so much time."""
        ...


class Connection(Protocol):
    def waitables(self) -> list[Waitable]: ...

    def send(self, parts: Sequence[Buffer]) -> bool:
        """False: there is no room, which means that the server does not read."""
        ...

    def receive(self) -> list[memoryview] | None: ...

    def lost_reason(self) -> str | None:
        """Why nothing will come any more; what came before can still be received."""
        ...

    def close(self, flush_seconds: float = 0.0) -> None: ...


class Transport(Protocol):
    def bind(self, endpoints: Sequence[str], max_message_bytes: int) -> ServerPort:
        """Raises ConfigError, with the endpoint in its message, when one cannot be bound."""
        ...

    def connect(self, endpoint: str, max_message_bytes: int, connect_seconds: float) -> Connection:
        """Returns at once; failing shows as `lost_reason`. A connection that is lost stays lost."""
        ...

    def close(self) -> None:
        """After all its ports and connections are closed."""
        ...
