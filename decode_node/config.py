"""Flags of a decode node."""

from __future__ import annotations

from pydantic import Field

from common.config import Count, Lease, NodeFlags, Seconds


class DecodeConfig(NodeFlags):
    """Tandem decode node: owns requests, fetches their KV from prefill nodes, samples every token."""

    lease_seconds: Lease = Field(10.0, description="silence of a prefill node after which a fetch from it ends")
    queue_seconds: Seconds = Field(60.0, gt=0, description="how long a prefill node may leave a fetch in its queue")
    max_requests: Count = Field(256, ge=1, description="most requests held at once, running and waiting")
    drain_seconds: Seconds = Field(60.0, ge=0, description="how long running requests may take to end after SIGTERM")
