"""Finds the most likely tokens of a row without sorting all of its vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from common.sampling_params import SamplingParams

_GROUP = 8
_BIN_SHIFT = 16  # bins of a 128th of a power of two


def highest(scaled: torch.Tensor, width: int) -> torch.Tensor:
    """Token ids of the `width` highest values, [R, width], in no order; which of those that tie for the end is open.

    They lie in the `width` groups with the highest maxima, so that only those need to be looked through. A group is
    every stride-th token: maxima of long vectors are quick.
    """
    stride, rest = divmod(scaled.shape[-1], _GROUP)
    if width * 4 > stride:
        return scaled.topk(width, dim=-1, sorted=False).indices
    grouped = scaled[:, : stride * _GROUP].unflatten(-1, (_GROUP, stride))
    groups = grouped.amax(-2).topk(width, dim=-1, sorted=False).indices
    members = (groups.unsqueeze(-1) + torch.arange(0, stride * _GROUP, stride)).flatten(1)
    if rest:
        tail = torch.arange(stride * _GROUP, scaled.shape[-1])
        members = torch.cat([members, tail.expand(len(members), -1)], dim=-1)
    return members.gather(1, scaled.gather(1, members).topk(width, dim=-1, sorted=False).indices)


def rank(values: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` highest values, best first, equal ones by token id, and their token ids. [R, width] each."""
    if width >= values.shape[-1]:
        return torch.sort(values, dim=-1, descending=True, stable=True)
    token_ids = highest(values, width).sort(dim=-1).values
    found, order = values.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return found, token_ids.gather(1, order)


def rank_all_kept(scaled: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, best first, equal ones by token id, and their token ids; [1, n] each: all that the filters may keep.

    scaled: float32 [1, vocab_size], the best at 0. A histogram tells up to where the ranking is needed; float32's bits
    sort as the numbers do, so that (bits, token id) is one integer and its sort the ranking.
    """
    distance = (0.0 - scaled[0]).nan_to_num_(nan=torch.inf, posinf=torch.inf).numpy()  # at least 0, and no -0
    bits = distance.view(np.int32)
    bins = bits >> _BIN_SHIFT
    needed = np.flatnonzero(bins <= _last_bin(bins, scaled[0].exp().numpy(), params))
    keys = np.sort(bits[needed].astype(np.int64) << 32 | needed)
    token_ids = torch.from_numpy(keys & 0xFFFFFFFF)
    return scaled[:, token_ids], token_ids.unsqueeze(0)


def _last_bin(bins: np.ndarray, mass: np.ndarray, params: SamplingParams) -> int:
    """One more than what the sums say, which are rounded otherwise than those of the ranking."""
    last = int(bins.max())
    if params.top_k > 0:
        last = min(last, int(np.searchsorted(np.bincount(bins).cumsum(), params.top_k)))
    elif params.top_p < 1.0:
        cumulative = np.bincount(bins, mass).cumsum()
        last = min(last, int(np.searchsorted(cumulative, params.top_p * cumulative[-1])))
    needs_all_top_k = params.top_k > 0 and params.top_p < 1.0  # top_p is a part of their sum
    if params.min_p > 0.0 and not needs_all_top_k:
        distance = np.array([0.0 - np.log(params.min_p)], np.float32)
        last = min(last, int(distance.view(np.int32)[0]) >> _BIN_SHIFT)
    return max(last + 1, int(bins.min()))  # where a broken model's logits are no numbers, there is no best at 0
