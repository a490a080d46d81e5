"""Flags of a prefill node."""

from __future__ import annotations

from pydantic import Field

from common.config import NodeFlags


class PrefillConfig(NodeFlags):
    """Tandem prefill node: reads prompts and serves their KV blocks to decode nodes."""

    fetch_advertise: str | None = Field(
        None, description="endpoint that peers are told to dial instead of the bound ones, such as that of a relay"
    )
    lease_seconds: float = Field(10.0, gt=0, description="silence of a peer after which all it had open is ended")
    hold_seconds: float = Field(30.0, gt=0, description="how long computed blocks wait for a client that takes none")
    drain_seconds: float = Field(60.0, ge=0, description="how long open fetches may take to end after SIGTERM")
