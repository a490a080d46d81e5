"""Matrix products with weights that oneDNN has put into its own order, once, when the model is loaded.

On one core (AVX-512) the packed product reads weights at memory speed from 4 rows on, where torch's own linear reaches
half of it, and a single row is quickest as one of four. So one copy of each weight serves every number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

MIN_ROWS = 4
_PACK_FOR_ROWS = 8

PackedWeight = torch.Tensor


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """[out_features, in_features] float32 -> an opaque tensor for `linear`; other dtypes stay as they are."""
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
    return packed


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    if num_rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out[:num_rows]
