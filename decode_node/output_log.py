"""Outputs that a proxy may ask for again: kept until it has acknowledged a finished request's last message.

ZMQ drops queued messages silently when a peer reconnects; `Resend` is answered from here. Pure bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import LiveRequest, RequestOutput


@dataclass
class _Entry:
    proxy_id: str
    leg: int
    next_index: int
    outputs: list[RequestOutput] = field(default_factory=list)
    last_sequence: int | None = None  # of the message with the finish reason, once it was sent
    forget_at: float = float("inf")


class OutputLog:
    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._entries: dict[str, _Entry] = {}

    def open(self, proxy_id: str, request_id: str, leg: int, next_index: int) -> None:
        self._entries[request_id] = _Entry(proxy_id, leg, next_index)

    def record(self, output: RequestOutput, sequence: int | None, now: float) -> None:
        """`sequence`: of the message that carried it, None when it could not be sent."""
        entry = self._entries.get(output.request_id)
        if entry is None or entry.leg != output.leg:
            return
        entry.outputs.append(output)
        entry.next_index = output.index + len(output.token_ids)
        if output.finish_reason is not None:
            entry.last_sequence = sequence
            entry.forget_at = now + self._keep_seconds

    def outputs_from(self, request_id: str, leg: int, index: int) -> list[RequestOutput]:
        """Every kept output from that index on; the finish reason, if any, included."""
        entry = self._entries.get(request_id)
        if entry is None or entry.leg != leg:
            return []
        return [o for o in entry.outputs if o.index >= index or o.finish_reason is not None]

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
            if (entry.proxy_id == proxy_id and entry.last_sequence is not None and entry.last_sequence <= sequence)
            or entry.forget_at < now
        ]
        for request_id in done:
            del self._entries[request_id]

    def live(self, proxy_id: str) -> list[LiveRequest]:
        return [
            LiveRequest(request_id, entry.leg, entry.next_index)
            for request_id, entry in self._entries.items()
            if entry.proxy_id == proxy_id
        ]
