"""Matrix products with weights that oneDNN has put into its own order, once, when the model is loaded.

Measured on one core with AVX-512 (float32, 576 x 3072, microseconds; plain is torch's own linear, transposed a product
with a transposed copy):

    rows          1     2     4     8    16    64   256
    plain       728  1483   779   934  1201  2946 11521
    transposed  388   702   928  1098  1421  3190  9826
    packed      493   498   336   523   708  2579  8413

Four rows are quicker than one, two or three, so that fewer are filled up to four: one packed copy, which replaces the
weight as it came, serves every number of rows best. Memory: as much as the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

MIN_ROWS = 4
_PACK_FOR_ROWS = 8

PackedWeight = torch.Tensor


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """[out_features, in_features] -> an opaque tensor for `linear`; the weight itself where oneDNN cannot pack it."""
    if not _can_pack(weight.dtype):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
    return packed


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    if num_rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out[:num_rows]
