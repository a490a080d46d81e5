"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Forward over one flat batch of a step.

The layers hold plain tensors and call `kernels.ops`; there is no autograd and no module tree. `load` takes the
checkpoint's names, so the loader needs to know nothing of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch

from common.errors import CheckpointError
from common.layers.attention import Attention
from common.layers.batch import FlatBatch
from common.layers.linear import Linear, Parameter
from common.layers.rotary import RotaryEmbedding
from common.model_config import ModelConfig
from kernels import ops

Load = Callable[[torch.Tensor], None]
BetweenLayers = Callable[[int], bool]
"""Called with the number of the layer that comes next; False leaves the pass."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SKIPPED = re.compile(r".*rotary_emb\.inv_freq")  # old checkpoints carry it; it follows from the config


class LlamaLayer:
    def __init__(self, config: ModelConfig, number: int, dtype: torch.dtype) -> None:
        self._number, self._eps = number, config.rms_norm_eps
        hidden, inner, activations = config.hidden_size, config.intermediate_size, ops.activation_dtype(dtype)
        self.input_norm = Parameter((hidden,), activations)
        self.post_norm = Parameter((hidden,), activations)
        self.attention = Attention(config, number, dtype)
        self.gate_up = Linear(hidden, [inner, inner], has_bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(inner, [hidden], has_bias=config.mlp_bias, dtype=dtype)
        self._fused: ops.FusedLayer | None = None

    def __call__(
        self,
        residual: torch.Tensor,
        batch: FlatBatch,
        pool: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """residual [N, hidden_size] is changed in place. The fused layer computes what stands below it, in one call."""
        if self._fused is not None:
            self._fused(residual, pool, batch.plan, cos, sin)
            return
        normed = ops.rms_norm(residual, self.input_norm.data, self._eps)
        attended = self.attention(normed, batch, pool, cos, sin)
        normed = ops.fused_add_rms_norm(attended, residual, self.post_norm.data, self._eps)
        residual.add_(self.down(ops.silu_and_mul(self.gate_up(normed))))

    def pack(self) -> None:
        """After loading."""
        linears = self.linears()
        for linear in linears:
            linear.pack()
        self._fused = ops.fuse_layer(self._parts([linear.packed for linear in linears if linear.packed is not None]))

    def _parts(self, packed: list[ops.PackedWeight]) -> ops.DecoderLayerParts:
        qkv, out, gate_up, down = packed
        return ops.DecoderLayerParts(
            number=self._number,
            num_heads=self.attention.num_heads,
            head_dim=self.attention.head_dim,
            eps=self._eps,
            input_norm=self.input_norm.data,
            post_norm=self.post_norm.data,
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            biases=tuple(None if linear.bias is None else linear.bias.data for linear in self.linears()),
            attention=self.attention.options,
        )

    def loaders(self) -> dict[str, Load]:
        attention = self.attention
        found: dict[str, Load] = {
            "input_layernorm.weight": self.input_norm.load,
            "post_attention_layernorm.weight": self.post_norm.load,
        }
        parts = [("self_attn.q_proj", attention.qkv, 0), ("self_attn.k_proj", attention.qkv, 1)]
        parts += [("self_attn.v_proj", attention.qkv, 2), ("self_attn.o_proj", attention.out, 0)]
        parts += [("mlp.gate_proj", self.gate_up, 0), ("mlp.up_proj", self.gate_up, 1), ("mlp.down_proj", self.down, 0)]
        for name, linear, part in parts:
            found[f"{name}.weight"] = partial(linear.load_weight, part=part)
            if linear.bias is not None:
                found[f"{name}.bias"] = partial(linear.load_bias, part=part)
        return found

    def linears(self) -> list[Linear]:
        return [self.attention.qkv, self.attention.out, self.gate_up, self.down]

    def norms(self) -> list[Parameter]:
        return [self.input_norm, self.post_norm]


class Llama:
    """has_head: False for a prefill node, which returns hidden states and never logits."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, has_head: bool, max_positions: int | None = None
    ) -> None:
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act is {config.hidden_act!r}, Llama here supports 'silu'")
        self.config = config
        self.has_head = has_head
        self.embedding = Parameter((config.vocab_size, config.hidden_size), dtype)
        self.layers = [LlamaLayer(config, number, dtype) for number in range(config.num_layers)]
        self.norm = Parameter((config.hidden_size,), ops.activation_dtype(dtype))
        self.head = Linear(config.hidden_size, [config.vocab_size], has_bias=False, dtype=dtype) if has_head else None
        self._rotary = RotaryEmbedding(config, max_positions)
        self._activations = ops.activation_dtype(dtype)

    # --- loading -------------------------------------------------------------------------------------------------

    def loader(self, name: str) -> Load | None:
        """Where the checkpoint's tensor of this name goes; None when it is not needed. Raises CheckpointError."""
        if name == "model.embed_tokens.weight":
            return self.embedding.load
        if name == "model.norm.weight":
            return self.norm.load
        if name == "lm_head.weight":
            is_unused = self.head is None or self.config.tie_word_embeddings
            return None if is_unused or self.head is None else self.head.load_weight
        if _SKIPPED.fullmatch(name):
            return None
        match = _LAYER.fullmatch(name)
        if match and int(match[1]) < len(self.layers):
            load = self.layers[int(match[1])].loaders().get(match[2])
            if load is not None:
                return load
        raise CheckpointError(f"tensor {name!r} does not belong to this model")

    def finish_loading(self) -> list[str]:
        """Ties the head, packs the weights; names of what is still not filled (then nothing is packed)."""
        if self.head is not None and self.config.tie_word_embeddings:
            self.head.load_weight(self.embedding.data)
        unfilled = [name for name, parameter in self._parameters() if not parameter.is_filled]
        if not unfilled:
            for layer in self.layers:
                layer.pack()
            if self.head is not None:
                self.head.pack()
        return unfilled

    def _parameters(self) -> list[tuple[str, Parameter]]:
        found = [("model.embed_tokens.weight", self.embedding), ("model.norm.weight", self.norm)]
        if self.head is not None:
            found.append(("lm_head.weight", self.head.weight))
        for number, layer in enumerate(self.layers):
            found += [(f"norm {i} of layer {number}", norm) for i, norm in enumerate(layer.norms())]
            for i, linear in enumerate(layer.linears()):
                found.append((f"linear {i} of layer {number}", linear.weight))
                if linear.bias is not None:
                    found.append((f"bias {i} of layer {number}", linear.bias))
        return found

    # --- computing -------------------------------------------------------------------------------------------------

    def forward(self, batch: FlatBatch, pool: torch.Tensor, between_layers: BetweenLayers) -> torch.Tensor | None:
        """Hidden states after the last norm, [N, hidden_size]; None when `between_layers` said to leave."""
        residual = self.embedding.data.index_select(0, batch.token_ids).to(self._activations)
        cos, sin = self._rotary.rows(batch.positions, self._activations)
        for number, layer in enumerate(self.layers):
            if not between_layers(number):
                return None
            layer(residual, batch, pool, cos, sin)
        return ops.rms_norm(residual, self.norm.data, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [N, vocab_size]."""
        assert self.head is not None
        return self.head(hidden.to(self._activations)).float()
