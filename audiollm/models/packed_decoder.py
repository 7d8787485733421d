"""The layers as rows of codes take them, one new position a row, with weights laid out for that: on a CPU.

A step of few rows through many small modules is mostly overhead, and reading weights that lie the other way round. Here
projections of the same input are one product, its weights lie as oneDNN's kernels want them, and activation, gate and
residual are part of the products. The numbers are those of `DualFFN.extend` (a test compares them), up to rounding.

Shapes: R rows of a cache, C hidden size, H heads, G key and value heads, D head dimension, K codebooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.models.cache import Cache, attend_cached
from audiollm.models.decoder import DualFFNLayer
from audiollm.models.dual_ffn import DualFFN, Head

MOST_BYTES = 2**31
"""Of weights: they are kept twice. In larger models the products take the time, and not what is around them."""


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`, with what follows it."""

    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *linears: nn.Linear) -> Product:
        """Of several that take the same input: their outputs side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears]).contiguous()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        packed = _one_dnn()._reorder_linear_weight(weight, 8)
        return cls(packed, torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        out: Tensor = _one_dnn()._linear_pointwise(x, self.packed, self.bias, activation, [], "")
        return out

    def combined(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        """`add` to another tensor, or `mul`tiply with it."""
        out: Tensor = _one_dnn()._linear_pointwise.binary(x, other, self.packed, self.bias, how)
        return out


@dataclass(frozen=True)
class PackedLayer:
    """A layer's weights for rows of codes."""

    norm_in: Tensor
    qkv: Product
    head_norms: tuple[Tensor, Tensor] | None
    out: Product
    norm_feed_forward: Tensor
    gate: Product
    up: Product
    down: Product

    @classmethod
    def of(cls, layer: DualFFNLayer) -> PackedLayer:
        attention, own = layer.self_attn, layer.has_audio_ffn
        feed_forward = layer.audio_mlp if own else layer.mlp
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        if own:
            norms = (layer.audio_input_layernorm, layer.audio_post_attention_layernorm)
        return cls(
            norms[0].weight.detach(),
            Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
            if attention.normalizes_heads
            else None,
            Product.of(attention.o_proj),
            norms[1].weight.detach(),
            Product.of(feed_forward.gate_proj),
            Product.of(feed_forward.up_proj),
            Product.of(feed_forward.down_proj),
        )


class PackedDecoder:
    """A copy of what rows of codes need of a model: the layers, and the audio head. See `packed_decoder`."""

    def __init__(self, model: DualFFN) -> None:
        self._model, self._state = model, _state_of(model)
        self._layers = [PackedLayer.of(layer) for layer in _layers(model)]
        self._head = Product.of(model.audio_lm_head)

    def is_current(self) -> bool:
        """The model's weights are still those that were copied."""
        return self._state == _state_of(self._model)

    def extend(self, codes_RK: Tensor, cache: Cache) -> Tensor:
        """As `DualFFN.extend` with codes alone: hidden states `[R, C]`."""
        config, eps = self._model.config, self._model.config.norm_eps
        heads, keys = config.num_heads, config.num_kv_heads
        attend = attend_cached(cache, len(codes_RK), None)
        cosine_R1D, sine_R1D = (table[attend.place_X][:, None] for table in (cache.cosine_LD, cache.sine_LD))
        half = config.head_dim // 2
        sine_R1D = torch.cat([-sine_R1D[..., :half], sine_R1D[..., half:]], dim=-1)
        x_RC = self._model.model.embed_audio_tokens(codes_RK)
        size = (config.hidden_size,)
        for index, layer in enumerate(self._layers):
            qkv_RC = layer.qkv(torch.rms_norm(x_RC, size, layer.norm_in, eps))
            qkv_RHD = qkv_RC.view(len(x_RC), heads + 2 * keys, config.head_dim)
            qk_RHD = qkv_RHD[:, : heads + keys]
            if layer.head_norms is not None:
                qk_RHD = _normalize_heads(qk_RHD, layer.head_norms, heads, eps)
            # the half-split rotation: (a, b) -> (a cos - b sin, b cos + a sin)
            qk_RHD = torch.addcmul(qk_RHD * cosine_R1D, qk_RHD.roll(half, -1), sine_R1D)
            out_RHD = attend(index, qk_RHD[:, :heads], qk_RHD[:, heads:], qkv_RHD[:, heads + keys :])
            x_RC = layer.out.combined(out_RHD.reshape(len(x_RC), -1), x_RC, "add")
            normed_RC = torch.rms_norm(x_RC, size, layer.norm_feed_forward, eps)
            fed = layer.up.combined(normed_RC, layer.gate(normed_RC, "swish"), "mul")
            x_RC = layer.down.combined(fed, x_RC, "add")
        return functional.rms_norm(x_RC, size, self._model.model.norm.weight, eps)

    def audio_logits(self, hidden_RC: Tensor) -> Tensor:
        """`[R, K, V]`."""
        config = self._model.config
        return self._head(hidden_RC).unflatten(-1, (config.num_codebooks, config.codebook_size))


def packed_decoder(model: DualFFN) -> PackedDecoder | None:
    """Of a model whose layers are plain (no adapters, nothing sharded), in float32 on a CPU with oneDNN; else None."""
    weights = list(model.parameters())
    if len(_layers(model)) < model.config.num_layers or not torch.backends.mkldnn.is_available():
        return None
    plain = all(type(module) in (nn.Linear, Head) for module in _projections(model)) and all(
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not weight.is_inference()  # whose changes cannot be told
        for weight in weights
    )
    fits = sum(weight.numel() * weight.element_size() for weight in weights) <= MOST_BYTES
    can = hasattr(_one_dnn(), "_linear_pointwise") and hasattr(_one_dnn(), "_reorder_linear_weight")
    return PackedDecoder(model) if plain and fits and can else None


def _one_dnn() -> Any:
    """PyTorch's oneDNN products, those that its compiler uses."""
    return torch.ops.mkldnn


def _layers(model: DualFFN) -> list[DualFFNLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, DualFFNLayer)]


def _projections(model: DualFFN) -> list[nn.Module]:
    found: list[nn.Module] = [model.audio_lm_head]
    for layer in _layers(model):
        attention, fed = layer.self_attn, layer.audio_mlp if layer.has_audio_ffn else layer.mlp
        found += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        found += [fed.gate_proj, fed.up_proj, fed.down_proj]
    return found


def _state_of(model: DualFFN) -> list[tuple[int, int]]:
    """Where the weights lie, and how often they were written to."""
    return [(weight.data_ptr(), weight._version) for weight in model.parameters()]


def _normalize_heads(qk_RHD: Tensor, norms: tuple[Tensor, Tensor], heads: int, eps: float) -> Tensor:
    size = qk_RHD.shape[-1:]
    query, key = qk_RHD[:, :heads], qk_RHD[:, heads:]
    normed = [torch.rms_norm(part, size, norm, eps) for part, norm in zip((query, key), norms, strict=True)]
    return torch.cat(normed, dim=1)
