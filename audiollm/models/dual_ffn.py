"""The DualFFN decoder: shared attention, separate norms and feed-forward for text and audio positions.

Parameter names are those of transformers' `HiggsAudioV2ForConditionalGeneration`, with which a test compares
the logits. Rows are sorted, text first, so that routing takes slices.

Shapes: S packed rows, B sequences, Q new positions, L cache length, C hidden size, H heads, G key and value
heads, D head dimension, K codebooks, V codes of a codebook with BOS and EOS, X and Y chosen rows, N layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from audiollm.data.packing import PackedBatch
from audiollm.models.attention import (
    BackendName,
    RopeScaling,
    SegmentLayout,
    attention_backend,
    cached_attention,
    packed_attention,
    rotary_angles,
    rotate,
)
from audiollm.models.kernels import RMSNorm, compute_dtype, silu_multiply
from audiollm.models.pretrained import load_model, save_model

MODEL_TYPE = "audiollm_dual_ffn"


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
    audio_ffn_layers: tuple[int, ...] | None = None
    """Layers with norms and a feed-forward of their own for audio; None for all. In the others audio takes the
    text's, as with `audio_dual_ffn_layers` in Boson's release."""

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # from a config.json
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {self.sliding_window}")
        strange = [n for n in self.audio_ffn_layers or () if not 0 <= n < self.num_layers]
        if strange:
            raise ValueError(f"audio_ffn_layers: no layer {strange} among {self.num_layers}")


@dataclass
class Cache:
    """Keys and values of every layer, preallocated, and how much of each sequence's is filled."""

    keys_NBGLD: Tensor
    values_NBGLD: Tensor
    lengths_B: Tensor

    @classmethod
    def empty(
        cls,
        config: DualFFNConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Cache:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        zeros = torch.zeros(shape, device=device, dtype=dtype)
        return cls(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.long, device=device))


class Attend(Protocol):
    """Attention of rotated queries over keys and values, in the order of the rows."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        """`[S, H, D]`."""


@dataclass(frozen=True)
class Rows:
    """What every layer needs to know of the rows that it is given."""

    num_text: int
    """The first rows are text, the others audio."""
    cosine_S1D: Tensor
    sine_S1D: Tensor
    attend: Attend


@dataclass(frozen=True)
class AttendPacked:
    """Inside each sequence of a pack."""

    layout: SegmentLayout
    window: int | None
    backend: BackendName

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        return packed_attention(q_SHD, k_SGD, v_SGD, self.layout, self.window, self.backend)


@dataclass(frozen=True)
class AttendCached:
    """New positions, appended to a cache, over all that is in it."""

    cache: Cache
    positions_BQ: Tensor
    row_of_S: Tensor
    order_S: Tensor
    span: slice
    """Cached positions that any query may look at."""
    visible_BQL: Tensor
    """Those of the span that each query may look at."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        shape = self.positions_BQ.shape
        q, k, v = (rows[self.row_of_S].unflatten(0, shape) for rows in (q_SHD, k_SGD, v_SGD))
        keys_BGLD, values_BGLD = self.cache.keys_NBGLD[layer], self.cache.values_NBGLD[layer]
        rows_B1 = torch.arange(shape[0], device=q.device)[:, None]
        keys_BGLD[rows_B1, :, self.positions_BQ] = k
        values_BGLD[rows_B1, :, self.positions_BQ] = v
        attended_BHQD = cached_attention(
            q.transpose(1, 2), keys_BGLD[:, :, self.span], values_BGLD[:, :, self.span], self.visible_BQL
        )
        return attended_BHQD.transpose(1, 2).flatten(0, 1)[self.order_S]


class FeedForward(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_multiply(self.gate_proj(x), self.up_proj(x)))
        return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_SC: Tensor, rows: Rows, layer: int) -> Tensor:
        q, k, v = (
            project(x_SC).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(each, rows.cosine_S1D, rows.sine_S1D) for each in (q, k))
        out: Tensor = self.o_proj(rows.attend(layer, q, k, v).flatten(1))
        return out


class DualFFNLayer(nn.Module):
    """One decoder layer: what is text takes one norm and feed-forward, what is audio the other."""

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
    return torch.cat([text(x_SC[:num_text]), audio(x_SC[num_text:])])


class Head(nn.Linear):
    """Hidden states to logits, without a bias."""

    def forward(self, hidden_XC: Tensor, use: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """The logits, or what the caller makes of the hidden states and the weight (a loss without the logits).

        A call of the module in either case, so that a strategy that shards weights finds out and gathers them.
        """
        return functional.linear(hidden_XC, self.weight) if use is None else use(hidden_XC, self.weight)


class AudioEmbedding(nn.Module):
    """One table for all codebooks; a position's embedding is the sum over its codes."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.embed_audio_tokens = nn.Embedding(
            config.num_codebooks * config.codebook_size, config.hidden_size
        )
        offsets = torch.arange(config.num_codebooks) * config.codebook_size
        self.register_buffer("offsets_K", offsets, persistent=False)
        self.offsets_K: Tensor

    def forward(self, codes_XK: Tensor) -> Tensor:
        return functional.embedding_bag(codes_XK + self.offsets_K, self.embed_audio_tokens.weight, mode="sum")


class Backbone(nn.Module):
    """Embeddings, layers and the last norm (`model.` in the key names)."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_audio_tokens = AudioEmbedding(config)
        self.layers = nn.ModuleList(DualFFNLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class DualFFN(nn.Module):
    """The audio-text language model: text logits and audio logits at any position."""

    _no_split_modules = ("DualFFNLayer",)

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.config = config
        self.attention: BackendName | Literal["auto"] = "auto"
        """What computes attention over packs in training (see `attention_backend`); elsewhere a kernel that is
        asked for may not fit (evaluations in float32), and `auto` takes its place."""
        self.activation_checkpointing = False
        """In training keep the input of each layer alone, and compute the layer again in the backward pass."""
        self.model = Backbone(config)
        self.text_lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.audio_lm_head = Head(config.hidden_size, config.num_codebooks * config.codebook_size, bias=False)
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, `[S, C]`, in the batch's order of rows."""
        x_SC = self._embed(batch.text_ids_X, batch.codes_YK)
        wanted = self.attention if self.training or self.attention == "sdpa" else "auto"
        backend = attention_backend(x_SC.device, compute_dtype(x_SC), self.config.head_dim, wanted)
        attend = AttendPacked(batch.layout, self.config.sliding_window, backend.name)
        return self._layers(x_SC, self._rows(len(batch.text_ids_X), batch.positions_S, attend))

    def text_logits(self, hidden_XC: Tensor) -> Tensor:
        """`[X, vocabulary]`."""
        logits: Tensor = self.text_lm_head(hidden_XC)
        return logits

    def audio_logits(self, hidden_XC: Tensor) -> Tensor:
        """`[X, K, V]`."""
        logits: Tensor = self.audio_lm_head(hidden_XC)
        return logits.unflatten(-1, (self.config.num_codebooks, self.config.codebook_size))

    def extend(
        self, text_ids_BQ: Tensor, codes_BQK: Tensor, is_audio_BQ: Tensor, new_B: Tensor, cache: Cache
    ) -> Tensor:
        """Append Q positions to every sequence's cache; returns hidden states `[B, Q, C]`.

        Args:
            new_B: how many of the Q positions are real; the rest is padding at the end, which is overwritten
                by the next call and never looked at.
        """
        batch, new = text_ids_BQ.shape
        is_audio_S = is_audio_BQ.flatten()
        order_S = torch.cat([(~is_audio_S).nonzero()[:, 0], is_audio_S.nonzero()[:, 0]])
        row_of_S, num_text = order_S.argsort(), int((~is_audio_S).sum())
        positions_BQ = cache.lengths_B[:, None] + torch.arange(new, device=order_S.device)
        attend = _attend_cached(cache, positions_BQ, row_of_S, order_S, self.config.sliding_window)
        codes_SK = codes_BQK.flatten(0, 1)
        x_SC = self._embed(text_ids_BQ.flatten()[order_S[:num_text]], codes_SK[order_S[num_text:]])
        hidden_SC = self._layers(x_SC, self._rows(num_text, positions_BQ.flatten()[order_S], attend))
        cache.lengths_B += new_B
        return hidden_SC[row_of_S].unflatten(0, (batch, new))

    def gradient_checkpointing_enable(self) -> None:
        """Compute the layers' activations again in the backward pass (Hugging Face's name for it)."""
        self.activation_checkpointing = True

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_model(folder, self, MODEL_TYPE, self.config)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> DualFFN:
        """Load what `save_pretrained` wrote, or a `train` stage's folder.

        Raises:
            ConfigError: nothing there, or another kind of model.
        """
        config, weights = load_model(Path(folder), MODEL_TYPE, DualFFNConfig)
        model = cls(config)
        model.load_state_dict(weights)
        return model.eval()

    def _embed(self, text_ids_X: Tensor, codes_YK: Tensor) -> Tensor:
        """Text rows, then audio rows."""
        return torch.cat([self.model.embed_tokens(text_ids_X), self.model.embed_audio_tokens(codes_YK)])

    def _rows(self, num_text: int, positions_S: Tensor, attend: Attend) -> Rows:
        config = self.config
        cosine, sine = rotary_angles(positions_S, config.head_dim, config.rope_theta, config.rope_scaling)
        return Rows(num_text, cosine[:, None], sine[:, None], attend)

    def _layers(self, x_SC: Tensor, rows: Rows) -> Tensor:
        """All layers and the last norm."""
        again = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.model.layers:
            x_SC = checkpoint(layer, x_SC, rows, use_reentrant=False) if again else layer(x_SC, rows)
        normed: Tensor = self.model.norm(x_SC)
        return normed


def _attend_cached(
    cache: Cache, positions_BQ: Tensor, row_of_S: Tensor, order_S: Tensor, window: int | None
) -> AttendCached:
    first = 0 if window is None else max(0, int(positions_BQ.min()) - window + 1)
    span = slice(first, int(positions_BQ.max()) + 1)
    place_L = torch.arange(span.start, span.stop, device=positions_BQ.device)
    behind_BQL = positions_BQ[:, :, None] - place_L
    visible_BQL = behind_BQL >= 0 if window is None else (behind_BQL >= 0) & (behind_BQL < window)
    return AttendCached(cache, positions_BQ, row_of_S, order_S, span, visible_BQL)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
