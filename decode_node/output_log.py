"""Outputs that a proxy may ask for again: kept until it has acknowledged the last message of a request.

ZMQ drops queued messages silently when a peer reconnects; `Resend` is answered from here. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.messages import LiveRequest, RequestOutput


@dataclass
class _Entry:
    proxy_id: str
    leg: int
    unfinished: set[int]  # choices
    outputs: list[RequestOutput] = field(default_factory=list)
    last_sequence: int | None = None  # of the last message with a finish reason, once it was sent
    forget_at: float = float("inf")

    def is_acknowledged(self, proxy_id: str, sequence: int) -> bool:
        return self.proxy_id == proxy_id and self.last_sequence is not None and self.last_sequence <= sequence


class OutputLog:
    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._entries: dict[str, _Entry] = {}

    def open(self, proxy_id: str, request_id: str, leg: int, choices: Iterable[int]) -> None:
        self._entries[request_id] = _Entry(proxy_id, leg, set(choices))

    def record(self, output: RequestOutput, sequence: int | None, now: float) -> None:
        """`sequence`: of the message that carried it, None when it could not be sent."""
        entry = self._entries.get(output.request_id)
        if entry is None or entry.leg != output.leg or output.choice not in entry.unfinished:
            return
        entry.outputs.append(output)
        if output.finish_reason is None:
            return
        entry.unfinished.remove(output.choice)
        entry.last_sequence = sequence
        entry.forget_at = now + self._keep_seconds

    def close_choice(self, request_id: str, choice: int) -> None:
        """Nobody wants this choice any more; the others are kept."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.unfinished.discard(choice)
        entry.outputs = [output for output in entry.outputs if output.choice != choice]
        if not entry.unfinished and not entry.outputs:
            del self._entries[request_id]

    def outputs_from(self, request_id: str, leg: int, choice: int, index: int) -> list[RequestOutput]:
        """Every kept output of a choice from that index on; the finish reason, if any, included."""
        entry = self._entries.get(request_id)
        if entry is None or entry.leg != leg:
            return []
        outputs = (output for output in entry.outputs if output.choice == choice)
        return [output for output in outputs if output.index >= index or output.finish_reason is not None]

    def forget(self, request_id: str) -> None:
        self._entries.pop(request_id, None)

    def forget_proxy(self, proxy_id: str) -> list[str]:
        """Drops all of a proxy's entries; the ids that were there."""
        gone = [request_id for request_id, entry in self._entries.items() if entry.proxy_id == proxy_id]
        for request_id in gone:
            del self._entries[request_id]
        return gone

    def acknowledge(self, proxy_id: str, sequence: int, now: float) -> None:
        done = [
            request_id
            for request_id, entry in self._entries.items()
            if not entry.unfinished and (entry.is_acknowledged(proxy_id, sequence) or entry.forget_at < now)
        ]
        for request_id in done:
            del self._entries[request_id]

    def live(self, proxy_id: str) -> list[LiveRequest]:
        return [
            LiveRequest(request_id, entry.leg)
            for request_id, entry in self._entries.items()
            if entry.proxy_id == proxy_id
        ]
