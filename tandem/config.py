"""Flags of `tandem serve`. Those of the engine are passed on to the nodes as they were given."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from common.config import MAX_THREADS, ClusterFlags, EngineFlags, Port, Seconds
from common.endpoints import check_bound, check_dialled


def split_arguments(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


Arguments = Annotated[list[str], NoDecode, BeforeValidator(split_arguments)]


class ServeConfig(EngineFlags, ClusterFlags):
    """Starts a proxy, prefill nodes and decode nodes on this machine, watches them, and stops them together."""

    prefill: int = Field(1, ge=0, le=64, description="number of prefill nodes; with 0 decode nodes prefill themselves")
    decode: int = Field(1, ge=1, le=64, description="number of decode nodes")
    host: str = Field("127.0.0.1", description="address of the OpenAI API")
    port: Port = Field(8000, description="port of the OpenAI API; 0 takes any free one")
    control_endpoint: str | None = Field(
        None, description="where nodes reach the proxy; default: port 8100 or any free one"
    )
    num_threads: int = Field(0, ge=0, le=MAX_THREADS, description="threads of each node; 0 shares the cores out evenly")
    startup_seconds: Seconds = Field(600.0, gt=0, description="how long the service may take to become ready")
    drain_seconds: Seconds = Field(5.0, ge=0, description="how long running requests may take to end after Ctrl-C")
    log_dir: Path | None = Field(None, description="folder for one log file a process; default: in the cache")
    proxy_args: Arguments = Field([], description="more flags for the proxy, in one quoted string")
    prefill_args: Arguments = Field([], description="more flags for every prefill node, in one quoted string")
    decode_args: Arguments = Field([], description="more flags for every decode node, in one quoted string")

    @field_validator("control_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else check_bound(check_dialled(value))
