"""Matrix products by torch, with weights that oneDNN has put into its own order, once, when the model is loaded.

Measured on one core with AVX-512 (float32, 576 x 3072, microseconds; plain is torch's own linear, transposed a product
with a transposed copy):

    rows          1     2     4     8    16    64   256
    plain       728  1483   779   934  1201  2946 11521
    transposed  388   702   928  1098  1421  3190  9826
    packed      493   498   336   523   708  2579  8413

Four rows are quicker than one, two or three, so that fewer are filled up to four: one packed copy, which replaces the
weight as it came, serves every number of rows best. Memory: as much as the weight. Quantised weights become float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.types import QuantizedWeight

MIN_ROWS = 4
_PACK_FOR_ROWS = 8


class TorchWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._dtype = weight.dtype
        if _can_pack(weight.dtype):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        self.num_bytes = weight.numel() * weight.element_size()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """In the weight's dtype, given back in that of x: a quantised weight is float32 beside bfloat16 rows."""
        if x.dtype != self._dtype:
            bias = None if bias is None else bias.to(self._dtype)
            return self.multiply(x.to(self._dtype), bias).to(x.dtype)
        if not self._weight.is_mkldnn:
            return F.linear(x, self._weight, bias)
        num_rows = x.shape[0]
        if num_rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, bias, "none", [], "")
        return out[:num_rows]


def pack_weight(weight: torch.Tensor | QuantizedWeight) -> TorchWeight:
    return TorchWeight(weight.dequantized() if isinstance(weight, QuantizedWeight) else weight)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
