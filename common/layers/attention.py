"""Grouped-query self-attention over the paged pool."""

from __future__ import annotations

import torch

from common.layers.batch import FlatBatch
from common.layers.linear import Linear, WeightForm
from common.model_config import ModelConfig
from kernels import ops


class Attention:
    def __init__(self, config: ModelConfig, layer: int, form: WeightForm) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._layer = layer
        self.options = ops.AttentionOptions(config.head_dim**-0.5)
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv = Linear(config.hidden_size, [query, key, key], has_bias=config.attention_bias, form=form)
        self.out = Linear(query, [config.hidden_size], has_bias=config.attention_bias, form=form)

    def __call__(
        self, x: torch.Tensor, batch: FlatBatch, pool: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """x [N, hidden_size]; cos and sin [N, head_dim] of the rows' positions (`RotaryEmbedding.rows`)."""
        num_rows, num_rotated = x.shape[0], self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(num_rows, num_rotated + self.num_kv_heads, self.head_dim)
        rotated = ops.rotary_embedding(heads[:, :num_rotated], cos, sin)
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        ops.write_kv(k, heads[:, num_rotated:], pool, self._layer, batch.plan)
        attended = ops.paged_attention(q, pool, self._layer, batch.plan, self.options)
        return self.out(attended.view(num_rows, -1))
