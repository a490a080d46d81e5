"""The proxy's flags. Each can also come from the environment, as TANDEM_ and its name in capitals."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field, SecretStr, field_validator

from common.config import DEFAULT_CONTROL_ENDPOINT, ClusterFlags, Count, ModelFlags, Port, Seconds, Size
from common.endpoints import check_bound
from proxy.admission import AdmissionLimits
from proxy.dispatcher import DispatchLimits


class ProxyConfig(ModelFlags, ClusterFlags):
    """Tandem's proxy: serves the OpenAI API over HTTP, and sends requests to the nodes that dial it."""

    host: str = Field("127.0.0.1", description="address of the HTTP server")
    port: Port = Field(8000, description="port of the HTTP server; 0 takes any free one")
    control_endpoint: str = Field(DEFAULT_CONTROL_ENDPOINT, description="where nodes dial in, tcp:// or ipc://")
    api_key: SecretStr | None = Field(
        None, min_length=1, description="key that clients must send; better given as TANDEM_API_KEY"
    )
    chat_template: str | None = Field(None, description="file (or text) that replaces the model's chat template")
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="where sampling fields come from that a request leaves out: auto, the model's "
        "generation_config.json; vllm, the API's neutral values",
    )

    max_queue: Count = Field(1024, ge=0, description="most requests that wait for a node with room; more get a 429")
    queue_seconds: Seconds = Field(60.0, gt=0, description="longest wait for a node with room; then a 429")
    node_wait_seconds: Seconds = Field(10.0, gt=0, description="longest wait while there is no decode node; then a 503")
    request_seconds: Seconds = Field(3600.0, gt=0, description="deadline for a whole request")
    max_lost_legs: Count = Field(3, ge=1, description="nodes that may fail under a request before it fails")
    min_split_tokens: Count = Field(
        16, ge=0, description="prompts shorter than this are computed by their decode node, without a prefill node"
    )
    stall_seconds: Seconds = Field(120.0, gt=0, description="a client that leaves its stream unread this long is gone")
    max_body_bytes: Size = Field(ByteSize(16 << 20), gt=0, description="largest request body, such as 16MiB")
    shutdown_grace_seconds: Seconds = Field(10.0, ge=0, description="time for running requests after SIGTERM")

    @field_validator("control_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        return check_bound(value)

    @property
    def admission_limits(self) -> AdmissionLimits:
        return AdmissionLimits(
            max_queue=self.max_queue,
            queue_seconds=self.queue_seconds,
            node_wait_seconds=self.node_wait_seconds,
            min_split_tokens=self.min_split_tokens,
        )

    @property
    def dispatch_limits(self) -> DispatchLimits:
        return DispatchLimits(max_lost_legs=self.max_lost_legs, request_seconds=self.request_seconds)
