"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Forward over one flat batch of a step.

The layers hold plain tensors and call `kernels.ops`; there is no autograd and no module tree. `load` takes the
checkpoint's names, so the loader needs to know nothing of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch

from common.errors import CheckpointError
from common.layers.attention import Attention
from common.layers.batch import FlatBatch
from common.layers.linear import Linear, Parameter, Weight, WeightForm
from common.layers.rotary import RotaryEmbedding
from common.model_config import ModelConfig
from kernels import ops

Load = Callable[[Weight], None]
BetweenLayers = Callable[[int], bool]
"""Called with the number of the layer that comes next; False leaves the pass."""

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SKIPPED = re.compile(r".*rotary_emb\.inv_freq")  # old checkpoints carry it; it follows from the config


class LlamaLayer:
    def __init__(self, config: ModelConfig, number: int, form: WeightForm) -> None:
        self._number, self._eps = number, config.rms_norm_eps
        hidden, inner, activations = config.hidden_size, config.intermediate_size, form.activations
        self.input_norm = Parameter((hidden,), activations)
        self.post_norm = Parameter((hidden,), activations)
        self.attention = Attention(config, number, form)
        self.gate_up = Linear(hidden, [inner, inner], has_bias=config.mlp_bias, form=form)
        self.down = Linear(inner, [hidden], has_bias=config.mlp_bias, form=form)
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

    def fuse(self) -> None:
        """After loading."""
        packed = [linear.packed for linear in self.linears() if linear.packed is not None]
        self._fused = ops.fuse_layer(self._parts(packed))

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
        found: dict[str, Load] = {f"{name}.weight": norm.load for name, norm in self.norms().items()}
        for name, linear, part in self.matrices():
            found[f"{name}.weight"] = partial(linear.load_weight, part=part)
            if linear.bias is not None:
                found[f"{name}.bias"] = partial(linear.load_bias, part=part)
        return found

    def matrices(self) -> list[tuple[str, Linear, int]]:
        """By the checkpoint's names: the layer, and the part of it, that a matrix becomes."""
        attention = self.attention
        return [
            ("self_attn.q_proj", attention.qkv, 0),
            ("self_attn.k_proj", attention.qkv, 1),
            ("self_attn.v_proj", attention.qkv, 2),
            ("self_attn.o_proj", attention.out, 0),
            ("mlp.gate_proj", self.gate_up, 0),
            ("mlp.up_proj", self.gate_up, 1),
            ("mlp.down_proj", self.down, 0),
        ]

    def linears(self) -> list[Linear]:
        return [self.attention.qkv, self.attention.out, self.gate_up, self.down]

    def norms(self) -> dict[str, Parameter]:
        return {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_norm}


class Llama:
    """has_head: False for a prefill node, which returns hidden states and never logits."""

    def __init__(
        self, config: ModelConfig, form: WeightForm, *, has_head: bool, max_positions: int | None = None
    ) -> None:
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act is {config.hidden_act!r}, Llama here supports 'silu'")
        self.config = config
        self.has_head = has_head
        self.embedding = Parameter((config.vocab_size, config.hidden_size), form.dtype)
        self.layers = [LlamaLayer(config, number, form) for number in range(config.num_layers)]
        self.norm = Parameter((config.hidden_size,), form.activations)
        self.head = Linear(config.hidden_size, [config.vocab_size], has_bias=False, form=form) if has_head else None
        self._head_name = _EMBEDDING if config.tie_word_embeddings else _HEAD
        self._rotary = RotaryEmbedding(config, max_positions)
        self._activations = form.activations

    # --- loading -------------------------------------------------------------------------------------------------

    def loader(self, name: str) -> Load | None:
        """Where the checkpoint's tensor of this name goes; None when it is not needed. Raises CheckpointError."""
        if name == f"{_EMBEDDING}.weight":
            return self._load_embedding
        if name == "model.norm.weight":
            return self.norm.load
        if name == f"{_HEAD}.weight":
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

    def _load_embedding(self, weight: Weight) -> None:
        """The table stays float; a head that is tied to it is packed like any other matrix."""
        self.embedding.load(weight)
        if self.head is not None and self.config.tie_word_embeddings:
            self.head.load_weight(weight)

    def finish_loading(self) -> list[str]:
        """Fuses the layers; names of what is still not filled (then nothing is fused)."""
        unfilled = [name for name, parameter in self._parameters() if not parameter.is_filled]
        for name, linear, part in self._matrices():
            unfilled += [f"{name}.weight"] if part in linear.missing_parts else []
            unfilled += [f"{name}.bias"] if part in linear.missing_biases else []
        if not unfilled:
            for layer in self.layers:
                layer.fuse()
        return list(dict.fromkeys(unfilled))  # a tied table stands for two

    def weight_formats(self) -> dict[str, str]:
        """float32, int4, ...: what each matrix of the checkpoint is multiplied as, by its name."""
        return {f"{name}.weight": linear.format for name, linear, _ in self._matrices()}

    def _matrices(self) -> Iterator[tuple[str, Linear, int]]:
        for number, layer in enumerate(self.layers):
            for name, linear, part in layer.matrices():
                yield f"model.layers.{number}.{name}", linear, part
        if self.head is not None:
            yield self._head_name, self.head, 0

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield f"{_EMBEDDING}.weight", self.embedding
        yield "model.norm.weight", self.norm
        for number, layer in enumerate(self.layers):
            for name, norm in layer.norms().items():
                yield f"model.layers.{number}.{name}.weight", norm

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
