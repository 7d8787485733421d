"""A model's generation on a CPU: the same prompts and steps, with weights laid out for them.

A step of few rows through many small modules is mostly overhead, and reading weights that lie the other way round. Here
projections of the same input are one product, its weights lie as oneDNN's kernels want them, and activation, gate and
residual are part of the products; products that are too small to be worth waking a thread for are left to one. The
numbers are those of `DualFFN.prefill` and `DualFFN.extend` (a test compares them), up to rounding.

Shapes: S rows of a pack or of a step, X of them text, Y codes; R rows of a cache, C hidden size, H heads, G key and
value heads, D head dimension, K codebooks, V codes or words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.packing import PackedBatch
from audiollm.models.appending import append_cached
from audiollm.models.cache import Cache, attend_cached, fill_cache
from audiollm.models.decoder import Attention, DualFFNConfig, DualFFNLayer, FeedForward, route
from audiollm.models.dual_ffn import DualFFN, Head
from audiollm.models.frozen.layers import FrozenHead, FrozenLinear
from audiollm.models.kernels import RMSNorm
from audiollm.models.stored_products import StoredProduct
from audiollm.products import Linear

MAX_WEIGHT_BYTES = 2**31
"""Largest model that gets a packed copy, which doubles its memory; a larger one gains little from it."""
MAX_SMALL_WEIGHT = 2**19
"""Numbers of a weight up to which a plain product of few rows takes less time than one of oneDNN."""
MIN_MULTIPLY_ADDS_PER_EXTRA_THREAD = 11_000_000
"""Work below which one thread is faster: it takes about 0.1 ms; two threads save half, but waking one costs as much."""
MULTIPLY_ADDS_PER_NUMBER_READ = 15
"""Multiply-adds in the time that it takes to read one number of a weight or of the cache."""


PACKED_LAYERS = (Linear, Head)
"""Classes of the projections that can be packed."""
PACKED_FIXED_LAYERS = (*PACKED_LAYERS, FrozenLinear, FrozenHead)
"""Classes of those of a model that nothing trains: where a policy is sampled, its rows are not rounded to bf16."""


class GenerationDecoder:
    """Decoder of a model's generation steps: its packed copy where it can have one, else the model itself.

    All generators of a model share it: the copy is made once, and again when weights have changed.
    """

    def __init__(self, model: DualFFN) -> None:
        self._model = model
        self._packed: PackedDecoder | None = None

    def current(self) -> DualFFN | PackedDecoder:
        """Return a decoder with the model's current weights."""
        if self._packed is None or not self._packed.is_current():
            self._packed = packed_decoder(self._model)
        return self._packed or self._model

    def release(self) -> None:
        """Let the packed copy go, whose memory a training between two generations can use."""
        self._packed = None


class PackedDecoder:
    """A copy of a model's layers and heads, with the methods that generation calls. See `packed_decoder`."""

    def __init__(self, model: DualFFN) -> None:
        self._model, self._state = model, _state_of(model)
        self._layers = [PackedLayer.of(layer, model.config) for layer in _layers(model)]
        self._norm = Norm.of(model.model.norm)
        self._text_head = Product.of(model.text_lm_head)
        fed = model.config.hidden_size * model.config.intermediate_size
        attention = _layers(model)[0].self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        attended = sum(linear.in_features * linear.out_features for linear in projections)
        self._weights_per_layer = attended + 3 * fed

    def is_current(self) -> bool:
        """Return whether the model's weights are still those that were copied."""
        return self._state == _state_of(self._model)

    def prefill(self, batch: PackedBatch, cache: Cache, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill the cache as `DualFFN.prefill` does; the last layer computes only keys and values."""
        config = self._model.config
        x_SC = self._model.embed_rows(batch)
        attend = fill_cache(cache, batch, rows, lengths, self._model.attend_packed(batch, x_SC))
        turn = RotaryAngles.by(*self._model.row_angles(batch))
        for index, layer in enumerate(self._layers):
            q_SHD, k_SGD, v_SGD = layer.begin(x_SC, batch.num_text, turn)
            if index + 1 == config.num_layers:
                attend.keep(index, k_SGD, v_SGD)
                return
            x_SC = layer.finish(x_SC, attend(index, q_SHD, k_SGD, v_SGD), batch.num_text)

    def extend(
        self, text_ids_X: Tensor, codes_YK: Tensor, cache: Cache, order_R: Tensor | None = None
    ) -> Tensor:
        """Extend the cache as `DualFFN.extend` does; return hidden states `[S, C]`, text first."""
        num_text, rows = len(text_ids_X), len(text_ids_X) + len(codes_YK)
        attend = attend_cached(cache, rows, order_R)
        backbone = self._model.model
        with threads_for(self._work(rows, max(keys.shape[2] for keys in attend.seen_keys_NBDL))):
            if num_text == rows:
                x_SC = backbone.embed_tokens(text_ids_X)
            elif num_text:
                x_SC = self._model.embed(text_ids_X, codes_YK)
            else:
                x_SC = backbone.embed_audio_tokens(codes_YK)
            tables = (cache.cosine_LD, cache.signed_sine_LD)
            turn = RotaryAngles(*(table.index_select(0, attend.position_X)[:, None] for table in tables))
            for index, layer in enumerate(self._layers):
                x_SC = layer.finish(x_SC, attend(index, *layer.begin(x_SC, num_text, turn)), num_text)
            return self._norm(x_SC)

    def append(
        self,
        text_ids_X: Tensor,
        codes_YK: Tensor,
        cache: Cache,
        counts: Sequence[int],
        order_X: Tensor | None = None,
        features_FC: Tensor | None = None,
    ) -> Tensor:
        """Extend the cache as `DualFFN.append` does; return hidden states `[X, C]`, text first."""
        num_text = len(text_ids_X) + (0 if features_FC is None else len(features_FC))
        attend = append_cached(cache, self._model.config, counts, order_X)
        with threads_for(self._work(num_text + len(codes_YK), attend.counts[2])):
            x_XC = self._model.embed(text_ids_X, codes_YK, features_FC)
            turn = RotaryAngles.by(attend.cosine_XD, attend.sine_XD)
            for index, layer in enumerate(self._layers):
                x_XC = layer.finish(x_XC, attend(index, *layer.begin(x_XC, num_text, turn)), num_text)
            return self._norm(x_XC)

    def audio_logits(self, hidden_YC: Tensor) -> Tensor:
        """Return audio logits `[Y, K, V]`."""
        config = self._model.config
        return self._audio_head(hidden_YC).view(-1, config.num_codebooks, config.codebook_size)

    def text_logits(self, hidden_XC: Tensor) -> Tensor:
        """Return text logits `[X, V]`."""
        return self._text_head(hidden_XC)

    @cached_property
    def _audio_head(self) -> Product | StoredProduct:
        """Packed when it is first needed: a model that writes has no use for it."""
        return Product.of(self._model.audio_lm_head)

    def _work(self, rows: int, span: int) -> int:
        """Return the average multiply-adds of a layer's six products (attention counts as one)."""
        config = self._model.config
        cached = rows * span * 2 * config.num_kv_heads * config.head_dim
        reading = MULTIPLY_ADDS_PER_NUMBER_READ
        return (self._weights_per_layer * (rows + reading) + cached * reading) // 6


def packed_decoder(model: DualFFN) -> PackedDecoder | None:
    """Pack a model of plain layers (no adapters, nothing sharded) in float32 on a CPU with oneDNN; None for others."""
    weights = list(model.parameters())
    if len(_layers(model)) < model.config.num_layers:
        return None
    layers = PACKED_LAYERS if any(weight.requires_grad for weight in weights) else PACKED_FIXED_LAYERS
    is_plain = all(type(module) in layers for module in _projections(model))
    return PackedDecoder(model) if is_plain and can_pack(weights) else None


def can_pack(weights: Sequence[Tensor]) -> bool:
    """Return whether these weights can have a packed copy: float32 on a CPU with oneDNN, at most 2 GB in all."""
    is_plain = all(
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not weight.is_inference()  # whose changes cannot be told
        for weight in weights
    )
    fits = sum(weight.numel() * weight.element_size() for weight in weights) <= MAX_WEIGHT_BYTES
    has_operators = hasattr(_one_dnn(), "_linear_pointwise") and hasattr(_one_dnn(), "_reorder_linear_weight")
    return is_plain and fits and torch.backends.mkldnn.is_available() and has_operators


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`, with what follows it.

    A small weight lies as a plain product wants it: a call of oneDNN takes 20 us beside its work.
    """

    packed: Tensor
    bias: Tensor | None
    is_small: bool

    @staticmethod
    def of(*linears: nn.Linear | FrozenLinear) -> Product | StoredProduct:
        """Pack linear layers that take the same input into one product with concatenated outputs."""
        if any(isinstance(linear, FrozenLinear) for linear in linears):
            return StoredProduct.of(*linears)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        is_small = weight.numel() <= MAX_SMALL_WEIGHT
        packed = weight.T.contiguous() if is_small else _one_dnn()._reorder_linear_weight(weight, 8)
        return Product(packed, torch.cat(biases) if biases else None, is_small)

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """The product, or `swish` of it."""
        if not self.is_small:
            out: Tensor = _one_dnn()._linear_pointwise.default(x, self.packed, self.bias, activation, [], "")
            return out
        plain = torch.mm(x, self.packed) if self.bias is None else torch.addmm(self.bias, x, self.packed)
        return functional.silu(plain, inplace=True) if activation == "swish" else plain

    def combined(self, x: Tensor, operand: Tensor, how: str) -> Tensor:
        """`add` to another tensor, or `mul`tiply with it."""
        if not self.is_small:
            out: Tensor = _one_dnn()._linear_pointwise.binary(x, operand, self.packed, self.bias, how)
            return out
        if how == "add" and self.bias is None:
            return torch.addmm(operand, x, self.packed)
        plain = self(x)
        return plain.add_(operand) if how == "add" else plain.mul_(operand)


@dataclass(frozen=True)
class Norm:
    """`RMSNorm` in four operations: torch's own takes eight on a CPU, where each takes longer than its numbers."""

    weight: Tensor
    eps_11: Tensor

    @classmethod
    def of(cls, norm: RMSNorm) -> Norm:
        return cls(norm.weight.detach(), torch.full((1, 1), norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.eps_11, length, length, value=1 / x.shape[-1])
        return (x * mean_square.rsqrt_()).mul_(self.weight)


@dataclass(frozen=True)
class RotaryAngles:
    """The rotary angles of each row, for the half-split rotation: (a, b) -> (a cos - b sin, b cos + a sin)."""

    cosine_S1D: Tensor
    signed_sine_S1D: Tensor

    @classmethod
    def by(cls, cosine_SD: Tensor, sine_SD: Tensor) -> RotaryAngles:
        first, second = sine_SD.chunk(2, dim=-1)
        return cls(cosine_SD[:, None], torch.cat([-first, second], dim=-1)[:, None])

    def __call__(self, heads_SHD: Tensor) -> None:
        """In place."""
        swapped_SHD = heads_SHD.roll(heads_SHD.shape[-1] // 2, -1)
        heads_SHD.mul_(self.cosine_S1D).addcmul_(swapped_SHD, self.signed_sine_S1D)


@dataclass(frozen=True)
class PackedFeedForward:
    """A norm and the feed-forward after it."""

    norm: Norm
    gate: Product | StoredProduct
    up: Product | StoredProduct
    down: Product | StoredProduct

    @classmethod
    def of(cls, norm: RMSNorm, fed: FeedForward) -> PackedFeedForward:
        return cls(
            Norm.of(norm), Product.of(fed.gate_proj), Product.of(fed.up_proj), Product.of(fed.down_proj)
        )

    def __call__(self, x_SC: Tensor) -> Tensor:
        """Added to its input."""
        normed_SC = self.norm(x_SC)
        return self.down.combined(
            self.up.combined(normed_SC, self.gate(normed_SC, "swish"), "mul"), x_SC, "add"
        )


@dataclass(frozen=True)
class PackedLayer:
    """A layer's weights; text and audio rows have the same norms and feed-forward where the layer has one for both."""

    heads: int
    keys: int
    text_norm: Norm
    audio_norm: Norm
    qkv: Product | StoredProduct
    head_norm: Norm | None
    """Of the heads of queries and keys, each with its weight."""
    out: Product | StoredProduct
    text: PackedFeedForward
    audio: PackedFeedForward

    @classmethod
    def of(cls, layer: DualFFNLayer, config: DualFFNConfig) -> PackedLayer:
        attention = layer.self_attn
        text_norm = audio_norm = Norm.of(layer.input_layernorm)
        text = audio = PackedFeedForward.of(layer.post_attention_layernorm, layer.mlp)
        if layer.has_audio_ffn:
            audio_norm = Norm.of(layer.audio_input_layernorm)
            audio = PackedFeedForward.of(layer.audio_post_attention_layernorm, layer.audio_mlp)
        return cls(
            config.num_heads,
            config.num_kv_heads,
            text_norm,
            audio_norm,
            Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
            _head_norm(attention, config) if attention.normalizes_heads else None,
            Product.of(attention.o_proj),
            text,
            audio,
        )

    def begin(self, x_SC: Tensor, num_text: int, turn: RotaryAngles) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[S, H, D]` and keys `[S, G, D]`, and values `[S, G, D]`."""
        normed_SC = route(x_SC, num_text, self.text_norm, self.audio_norm)
        both, heads = self.heads + self.keys, self.heads + 2 * self.keys
        qkv_SHD = self.qkv(normed_SC).view(len(x_SC), heads, -1)
        qk_SHD, v_SGD = qkv_SHD.split((both, self.keys), dim=1)
        if self.head_norm is not None:
            qk_SHD = self.head_norm(qk_SHD)
        turn(qk_SHD)
        q_SHD, k_SGD = qk_SHD.split((self.heads, self.keys), dim=1)
        return q_SHD, k_SGD, v_SGD

    def finish(self, x_SC: Tensor, attended_SHD: Tensor, num_text: int) -> Tensor:
        """Compute the next layer's input from the output of attention."""
        x_SC = self.out.combined(attended_SHD.flatten(1), x_SC, "add")
        return route(x_SC, num_text, self.text, self.audio)


def _head_norm(attention: Attention, config: DualFFNConfig) -> Norm:
    """One norm over the heads of queries and keys."""
    norms = ((attention.q_norm, config.num_heads), (attention.k_norm, config.num_kv_heads))
    weight_HD = torch.cat([norm.weight.detach().expand(heads, -1) for norm, heads in norms])
    return Norm(weight_HD, torch.full((1, 1), attention.q_norm.eps))


@contextmanager
def threads_for(work: int) -> Iterator[None]:
    """Run little work on one thread, and more work on all threads."""
    threads = torch.get_num_threads()
    if threads == 1 or work > MIN_MULTIPLY_ADDS_PER_EXTRA_THREAD:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _one_dnn() -> Any:
    """PyTorch's oneDNN products, those that its compiler uses."""
    return torch.ops.mkldnn


def _layers(model: DualFFN) -> list[DualFFNLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, DualFFNLayer)]


def _projections(model: DualFFN) -> list[nn.Module]:
    projections: list[nn.Module] = [model.audio_lm_head, model.text_lm_head]
    for layer in _layers(model):
        attention = layer.self_attn
        projections += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        for fed in (layer.mlp, layer.audio_mlp) if layer.has_audio_ffn else (layer.mlp,):
            projections += [fed.gate_proj, fed.up_proj, fed.down_proj]
    return projections


def _state_of(model: DualFFN) -> tuple[int, list[tuple[int, int]]]:
    """Return the state that reveals a change: announced changes, weight addresses, and torch's counts of writes."""
    return model.weight_changes, [(weight.data_ptr(), weight._version) for weight in model.parameters()]
