"""What rules a scheduler: limits, policies, modes. The names are the flags' (see `common/config.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import PreemptionMode, SchedulingPolicy
from common.errors import ConfigError

_COUNTS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_num_waiting", "max_num_partial_prefills")


@dataclass(frozen=True)
class SchedulerConfig:
    """Raises ConfigError for values that do not go together.

    max_num_batched_tokens: token budget of a step. max_num_seqs: most requests that run or wait for KV at once.
    max_model_len: most tokens of a request, prompt and outputs. max_num_waiting: bound of the queue.
    enable_chunked_prefill: off, a prompt is computed in one step, whole.
    long_prefill_token_threshold: most tokens of one request in a step; 0 for the budget alone.
    max_num_partial_prefills: most prompts that a step may leave partly computed; more are not begun.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 2048
    max_num_waiting: int = 8192
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 4
    scheduling_policy: SchedulingPolicy = "priority"
    preemption_mode: PreemptionMode = "auto"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError("--long-prefill-token-threshold needs chunked prefill, which is switched off")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, must not be negative"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "without chunked prefill a step must hold the longest request, but --max-num-batched-tokens is"
                f" {self.max_num_batched_tokens} and --max-model-len is {self.max_model_len}; raise the one, or lower"
                " the other"
            )

    @property
    def max_num_running(self) -> int:
        """Never more than the budget has tokens, so that every running request can advance in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk(self) -> int:
        """Most tokens of one request in a step."""
        if not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
