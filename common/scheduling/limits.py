"""What can never run, and so is refused at once, with the numbers. Pure functions of a request."""

from __future__ import annotations

from common.errors import ContextLengthError, InvalidRequestError
from common.request import Request
from common.scheduling.config import SchedulerConfig
from common.scheduling.kv_cache_manager import KVCacheManager


def check_fits(config: SchedulerConfig, cache: KVCacheManager, request: Request) -> None:
    """Raises ContextLengthError or InvalidRequestError when a request that is not added yet can never run."""
    _check_length(config, cache, request)
    _check_unfinished(request)
    if request.params is None:
        return
    if request.params.beam_search is not None:
        _check_beams(config, cache, request, request.params.beam_search.width)
    elif request.choices:
        _check_choices(config, cache, request)


def _check_length(config: SchedulerConfig, cache: KVCacheManager, request: Request) -> None:
    num_tokens = request.num_tokens
    needed = num_tokens if request.is_compute_only else num_tokens + 1
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


def _check_unfinished(request: Request) -> None:
    """A request that moved here may have had all its outputs."""
    max_tokens = None if request.params is None else request.params.max_tokens
    if max_tokens is not None and len(request.output_token_ids) >= max_tokens:
        raise InvalidRequestError(
            f"the request came with {len(request.output_token_ids)} outputs and max_tokens is {max_tokens}:"
            " nothing is left to generate"
        )


def _check_choices(config: SchedulerConfig, cache: KVCacheManager, request: Request) -> None:
    """Their first outputs are computed together; later ones can wait for each other."""
    count = len(request.choices)
    if count > config.max_num_running:
        raise InvalidRequestError(
            f"n is {count}, this node runs at most {config.max_num_running} sequences at once", param="n"
        )
    needed = cache.layout.num_blocks_for(request.num_tokens) + count
    if needed > cache.pool.num_usable:
        raise InvalidRequestError(
            f"a prompt of {request.num_tokens} tokens with n = {count} needs {needed} blocks of KV cache;"
            f" there are {cache.pool.num_usable}",
            param="n",
        )


def _check_beams(config: SchedulerConfig, cache: KVCacheManager, request: Request, width: int) -> None:
    """Beams go on together to the end: all of them must fit, however long they become."""
    if width > config.max_num_running:
        raise InvalidRequestError(
            f"beam_width is {width}, this node runs at most {config.max_num_running} sequences at once",
            param="beam_width",
        )
    num_blocks_for = cache.layout.num_blocks_for
    longest = min(config.max_model_len, request.max_num_tokens)
    num_shared = request.num_tokens // cache.block_size
    needed = num_blocks_for(request.num_tokens) + width * (num_blocks_for(longest) - num_shared)
    if needed > cache.pool.num_usable:
        raise InvalidRequestError(
            f"a beam search of width {width} up to {longest} tokens may need {needed} blocks of KV cache, there are"
            f" {cache.pool.num_usable}; a smaller max_tokens or beam_width would fit",
            param="beam_width",
        )
