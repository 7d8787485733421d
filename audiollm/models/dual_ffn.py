"""The DualFFN decoder: shared attention, separate norms and feed-forward for text and audio positions.

Parameter names are those of transformers' `HiggsAudioV2ForConditionalGeneration`, with which a test compares
the logits. Rows are sorted, text first, so that routing takes slices.

Shapes: S packed positions, B sequences, Q new positions, L cache length, C hidden size, H heads, D head
dimension, K codebooks, V codes of a codebook with BOS and EOS, X chosen positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.packing import PackedBatch
from audiollm.models.attention import cached_attention, packed_attention, rotary_angles, rotate
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
    norm_eps: float = 1e-5
    dropout: float = 0.0


@dataclass
class Cache:
    """Keys and values of every layer, preallocated, and how much of each sequence's is filled."""

    keys_NBHLD: Tensor
    values_NBHLD: Tensor
    lengths_B: Tensor

    @classmethod
    def empty(cls, config: DualFFNConfig, batch: int, length: int, device: torch.device) -> Cache:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        zeros = torch.zeros(shape, device=device)
        return cls(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.long, device=device))


class FeedForward(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
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

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[..., heads, D]`, rotated."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v


class DualFFNLayer(nn.Module):
    """One decoder layer: what is text takes one norm and feed-forward, what is audio the other."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp, self.audio_mlp = FeedForward(config), FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.audio_input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.audio_post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def norm_in(self, x_SC: Tensor, num_text: int) -> Tensor:
        return route(x_SC, num_text, self.input_layernorm, self.audio_input_layernorm)

    def feed_forward(self, x_SC: Tensor, num_text: int) -> Tensor:
        return route(
            x_SC,
            num_text,
            lambda x: self.mlp(self.post_attention_layernorm(x)),
            lambda x: self.audio_mlp(self.audio_post_attention_layernorm(x)),
        )


def route(
    x_SC: Tensor, num_text: int, text: Callable[[Tensor], Tensor], audio: Callable[[Tensor], Tensor]
) -> Tensor:
    """`text` of the first `num_text` rows and `audio` of the others."""
    if num_text == len(x_SC):
        return text(x_SC)
    if num_text == 0:
        return audio(x_SC)
    return torch.cat([text(x_SC[:num_text]), audio(x_SC[num_text:])])


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
        self.layers = nn.ModuleList(DualFFNLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class DualFFN(nn.Module):
    """The audio-text language model: text logits and audio logits at any position."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.text_lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.audio_lm_head = nn.Linear(
            config.hidden_size, config.num_codebooks * config.codebook_size, bias=False
        )
        self.apply(_initialize)
        for layer in self._layers():
            for down in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.audio_mlp.down_proj):
                nn.init.normal_(down.weight, std=0.02 / (2 * config.num_layers) ** 0.5)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, `[S, C]`, in the batch's order of rows."""
        num_text = len(batch.text_ids_X)
        x_SC = self._embed(batch.text_ids_X, batch.codes_YK)
        cosine, sine = rotary_angles(batch.positions_S, self.config.head_dim, self.config.rope_theta)
        cosine, sine = cosine[:, None], sine[:, None]
        for layer in self._layers():
            normed_SC = layer.norm_in(x_SC, num_text)
            q_SHD, k_SHD, v_SHD = layer.self_attn.project(normed_SC, cosine, sine)
            attended_SHD = packed_attention(q_SHD, k_SHD, v_SHD, batch.layout)
            x_SC = x_SC + layer.self_attn.o_proj(attended_SHD.flatten(1))
            x_SC = x_SC + self._drop(layer.feed_forward(x_SC, num_text))
        normed: Tensor = self.model.norm(x_SC)
        return normed

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
        codes_SK = codes_BQK.flatten(0, 1)
        x_SC = self._embed(text_ids_BQ.flatten()[order_S[:num_text]], codes_SK[order_S[num_text:]])
        positions_BQ = cache.lengths_B[:, None] + torch.arange(new, device=x_SC.device)
        cosine, sine = rotary_angles(positions_BQ, self.config.head_dim, self.config.rope_theta)
        cosine, sine = cosine[:, :, None], sine[:, :, None]
        span = int(positions_BQ.max()) + 1
        visible_BQL = torch.arange(span, device=x_SC.device)[None, None] <= positions_BQ[:, :, None]
        rows_B1 = torch.arange(batch, device=x_SC.device)[:, None]
        for index, layer in enumerate(self._layers()):
            normed_BQC = layer.norm_in(x_SC, num_text)[row_of_S].unflatten(0, (batch, new))
            q, k, v = layer.self_attn.project(normed_BQC, cosine, sine)
            cache.keys_NBHLD[index][rows_B1, :, positions_BQ] = k
            cache.values_NBHLD[index][rows_B1, :, positions_BQ] = v
            attended = cached_attention(
                q.transpose(1, 2),
                cache.keys_NBHLD[index][:, :, :span],
                cache.values_NBHLD[index][:, :, :span],
                visible_BQL,
            )
            attended_SC = attended.transpose(1, 2).flatten(2).flatten(0, 1)[order_S]
            x_SC = x_SC + layer.self_attn.o_proj(attended_SC)
            x_SC = x_SC + layer.feed_forward(x_SC, num_text)
        cache.lengths_B += new_B
        hidden: Tensor = self.model.norm(x_SC)[row_of_S].unflatten(0, (batch, new))
        return hidden

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

    def _layers(self) -> list[DualFFNLayer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def _embed(self, text_ids_X: Tensor, codes_YK: Tensor) -> Tensor:
        """Text rows, then audio rows."""
        return torch.cat([self.model.embed_tokens(text_ids_X), self.model.embed_audio_tokens(codes_YK)])

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
