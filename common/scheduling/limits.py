"""What can never run, and so is refused at once, with the numbers. Pure functions of a request's size."""

from __future__ import annotations

from common.errors import ContextLengthError, InvalidRequestError
from common.request import Request
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager


def check_fits(config: SchedulerConfig, cache: KVCacheManager, num_tokens: int, *, is_compute_only: bool) -> None:
    """Raises ContextLengthError or InvalidRequestError when so many tokens, and one output if it is to have outputs,
    can never fit."""
    needed = num_tokens if is_compute_only else num_tokens + 1
    if num_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens, at least 1 is needed")
    if needed > config.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, with at least {needed - num_tokens} for the answer;"
            f" the maximum context length is {config.max_model_len} tokens"
        )
    if needed > cache.capacity_tokens:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens, with at least {needed - num_tokens} for the answer;"
            f" the KV cache holds {cache.capacity_tokens} tokens"
            f" ({cache.pool.num_usable} blocks of {cache.block_size})"
        )


def check_unfinished(request: Request) -> None:
    """Raises InvalidRequestError when a request that moved here has had all its outputs."""
    max_tokens = None if request.params is None else request.params.max_tokens
    if max_tokens is not None and len(request.output_token_ids) >= max_tokens:
        raise InvalidRequestError(
            f"the request came with {len(request.output_token_ids)} outputs and max_tokens is {max_tokens}:"
            " nothing is left to generate"
        )
