"""Wraps a transport and does to its clients' messages, both ways, what bad networks do. Seeded, for tests.

A message may be dropped, sent twice, held back until a few later ones have passed, or have one bit flipped; a
connection may break after a number of messages.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.frames import Buffer
from kvtransfer.transports.base import Connection, ServerPort, Transport, Waitable

_MAX_HELD_BACK = 3


@dataclass(frozen=True)
class Faults:
    """Probabilities for each message; `close_after` is a number of messages, both ways together."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    close_after: int | None = None


class _Direction:
    """What comes out for each message that goes in."""

    def __init__(self, faults: Faults, rng: random.Random, counts: Counter[str]) -> None:
        self._faults = faults
        self._rng = rng
        self._counts = counts
        self._held: deque[tuple[int, list[Buffer]]] = deque()  # (messages still to pass, message)

    def pass_on(self, parts: Sequence[Buffer]) -> list[list[Buffer]]:
        out = self._one(list(parts))
        self._held = deque((left - 1, held) for left, held in self._held)
        while self._held and self._held[0][0] < 0:
            out.append(self._held.popleft()[1])
        return out

    def _one(self, parts: list[Buffer]) -> list[list[Buffer]]:
        if self._happens("drop"):
            return []
        if self._happens("corrupt"):
            parts = self._flip_bit(parts)
        if self._happens("reorder"):
            self._held.append((self._rng.randint(1, _MAX_HELD_BACK), [bytes(part) for part in parts]))
            return []
        return [parts, parts] if self._happens("duplicate") else [parts]

    def _happens(self, fault: str) -> bool:
        happens: bool = self._rng.random() < getattr(self._faults, fault)
        self._counts[fault] += happens
        return happens

    def _flip_bit(self, parts: list[Buffer]) -> list[Buffer]:
        index = self._rng.choice([i for i, part in enumerate(parts) if len(part)])
        changed = bytearray(parts[index])
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return [*parts[:index], bytes(changed), *parts[index + 1 :]]


class FaultyConnection:
    def __init__(self, inner: Connection, faults: Faults, seed: int, counts: Counter[str]) -> None:
        self._inner = inner
        self._faults = faults
        self._num_messages = 0
        self._outgoing = _Direction(faults, random.Random(seed), counts)
        self._incoming = _Direction(faults, random.Random(seed + 1), counts)
        self._arrived: deque[list[Buffer]] = deque()

    def waitables(self) -> list[Waitable]:
        return self._inner.waitables()

    def send(self, parts: Sequence[Buffer]) -> bool:
        self._num_messages += 1
        if self._is_broken():
            return True
        return all(self._inner.send(message) for message in self._outgoing.pass_on(parts))

    def receive(self) -> list[memoryview] | None:
        while not self._arrived:
            parts = self._inner.receive()
            if parts is None or self._is_broken():
                return None
            self._num_messages += 1
            self._arrived.extend(self._incoming.pass_on(parts))
        return [memoryview(part) for part in self._arrived.popleft()]

    def lost_reason(self) -> str | None:
        return "connection broken on purpose" if self._is_broken() else self._inner.lost_reason()

    def _is_broken(self) -> bool:
        limit = self._faults.close_after
        return limit is not None and self._num_messages >= limit

    def close(self, flush_seconds: float = 0.0) -> None:
        self._inner.close(flush_seconds)


class FaultyTransport:
    """Each connection gets a seed of its own, in the order of dialing. `counts`: the faults that happened."""

    def __init__(self, inner: Transport, faults: Faults, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._inner = inner
        self._faults = faults
        self._seeds = random.Random(seed)

    def bind(self, endpoints: Sequence[str], max_message_bytes: int) -> ServerPort:
        return self._inner.bind(endpoints, max_message_bytes)

    def connect(self, endpoint: str, max_message_bytes: int, connect_seconds: float) -> Connection:
        inner = self._inner.connect(endpoint, max_message_bytes, connect_seconds)
        return FaultyConnection(inner, self._faults, self._seeds.getrandbits(32), self.counts)

    def close(self) -> None:
        self._inner.close()
