"""Flags of a prefill node."""

from __future__ import annotations

from pydantic import Field, field_validator

from common.config import Lease, NodeFlags, Seconds
from common.endpoints import check_dialled


class PrefillConfig(NodeFlags):
    """Tandem prefill node: reads prompts and serves their KV blocks to decode nodes."""

    fetch_advertise: str | None = Field(
        None, description="endpoint that peers are told to dial instead of the bound ones, such as that of a relay"
    )
    lease_seconds: Lease = Field(10.0, description="silence of a peer after which all it had open is ended")
    hold_seconds: Seconds = Field(30.0, gt=0, description="how long computed blocks wait for a client that takes none")
    drain_seconds: Seconds = Field(60.0, ge=0, description="how long open fetches may take to end after SIGTERM")

    @field_validator("fetch_advertise")
    @classmethod
    def _check_fetch_advertise(cls, value: str | None) -> str | None:
        return None if value is None else check_dialled(value)
