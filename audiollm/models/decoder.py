"""The layers of the DualFFN decoder: shared attention, separate norms and feed-forward for text and audio rows.

Rows are sorted, text first, so that routing takes slices.

Shapes: S rows, C hidden size, H heads, G key and value heads, D head dimension, X and Y chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.packing import SegmentLayout
from audiollm.models.attention import BackendName, PrefixTurns, RopeScaling, packed_attention, rotate
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.kernels import RMSNorm, silu_multiply
from audiollm.products import Linear


@dataclass(frozen=True)
class DualFFNConfig:
    """The shape of the decoder."""

    vocab_size: int
    num_codebooks: int = 8
    codebook_size: int = 1026
    """Codes of one codebook, BOS and EOS included (1026, as published)."""
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    dropout: float = 0.0
    sliding_window: int | None = None
    """A position sees itself and this many less one before it; None for all before it."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers with that window, while the others see all; None: all layers have it."""
    audio_ffn_layers: tuple[int, ...] | None = None
    """Layers with norms and a feed-forward of their own for audio; None for all. In the others audio takes the
    text's, as with `audio_dual_ffn_layers` in Boson's release."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, as in Qwen2."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head, before they are rotated, as in Qwen3."""
    max_position_embeddings: int = 2048
    """Positions of the longest sample in training, as far as known: a statement, nothing is cut there."""
    audio_encoder: AudioEncoderConfig | None = None
    """Encoder for continuous features of heard audio; None: audio is heard as codes alone."""

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # from a config.json
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.audio_encoder, dict):
            object.__setattr__(self, "audio_encoder", AudioEncoderConfig(**self.audio_encoder))
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {self.sliding_window}")
        for name in ("audio_ffn_layers", "sliding_window_layers"):
            strange = [n for n in getattr(self, name) or () if not 0 <= n < self.num_layers]
            if strange:
                raise ValueError(f"{name}: no layer {strange} among {self.num_layers}")

    def window_of(self, layer: int) -> int | None:
        """The positions that one sees there; None for all before it."""
        windowed = self.sliding_window_layers is None or layer in self.sliding_window_layers
        return self.sliding_window if windowed else None


class Attend(Protocol):
    """Attention of rotated queries over keys and values, in the order of the rows."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        """`[S, H, D]`."""


@dataclass(frozen=True)
class Rows:
    """Row information shared by all layers."""

    num_text: int
    """The first rows are text, the others audio."""
    cosine_S1D: Tensor
    sine_S1D: Tensor
    attend: Attend


@dataclass(frozen=True)
class AttendPacked:
    """Inside each sequence of a pack."""

    layout: SegmentLayout
    config: DualFFNConfig
    backend: BackendName
    turns: PrefixTurns | None = None
    """Of the queries against kept prefixes; None where no sequence has one."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        window = self.config.window_of(layer)
        if self.turns is not None and window is not None:
            return self.turns.attend(q_SHD, k_SGD, v_SGD, self.layout, window)
        return packed_attention(q_SHD, k_SGD, v_SGD, self.layout, window, self.backend)


class FeedForward(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_multiply(self.gate_proj(x), self.up_proj(x)))
        return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; with biases (Qwen2) or normalised heads (Qwen3) if asked."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, wide, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.o_proj = Linear(wide, config.hidden_size, bias=False)
        self.normalizes_heads = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_SC: Tensor, rows: Rows, layer: int) -> Tensor:
        q, k, v = (
            project(x_SC).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normalizes_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(heads, rows.cosine_S1D, rows.sine_S1D) for heads in (q, k))
        out: Tensor = self.o_proj(rows.attend(layer, q, k, v).flatten(1))
        return out


class DualFFNLayer(nn.Module):
    """A decoder layer with shared attention; text and audio rows have separate norms and feed-forwards."""

    def __init__(self, config: DualFFNConfig, index: int) -> None:
        super().__init__()
        self.index, self.dropout = index, config.dropout
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.has_audio_ffn = config.audio_ffn_layers is None or index in config.audio_ffn_layers
        if self.has_audio_ffn:
            self.audio_mlp = FeedForward(config)
            self.audio_input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
            self.audio_post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_SC: Tensor, rows: Rows) -> Tensor:
        """Hidden states after this layer, rows in the same order."""
        x_SC = x_SC + self.self_attn(self._norm_in(x_SC, rows.num_text), rows, self.index)
        fed_SC = self._feed_forward(x_SC, rows.num_text)
        return x_SC + (functional.dropout(fed_SC, self.dropout, self.training) if self.dropout else fed_SC)

    def _norm_in(self, x_SC: Tensor, num_text: int) -> Tensor:
        if not self.has_audio_ffn:
            normed: Tensor = self.input_layernorm(x_SC)
            return normed
        return route(x_SC, num_text, self.input_layernorm, self.audio_input_layernorm)

    def _feed_forward(self, x_SC: Tensor, num_text: int) -> Tensor:
        if not self.has_audio_ffn:
            return self._text_branch(x_SC)
        return route(x_SC, num_text, self._text_branch, self._audio_branch)

    def _text_branch(self, x_XC: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.post_attention_layernorm(x_XC))
        return out

    def _audio_branch(self, x_YC: Tensor) -> Tensor:
        out: Tensor = self.audio_mlp(self.audio_post_attention_layernorm(x_YC))
        return out


def route(
    x_SC: Tensor, num_text: int, text: Callable[[Tensor], Tensor], audio: Callable[[Tensor], Tensor]
) -> Tensor:
    """`text` of the first `num_text` rows and `audio` of the others.

    Training takes both, always: a pack has rows of both kinds. Generation often has audio rows alone.
    """
    if num_text == len(x_SC):
        return text(x_SC)
    if num_text == 0:
        return audio(x_SC)
    # the backward pass of a split is one copy, that of two slices writes all rows twice
    text_XC, audio_YC = x_SC.split((num_text, len(x_SC) - num_text))
    return torch.cat([text(text_XC), audio(audio_YC)])
