"""The DualFFN audio-text language model: embeddings, decoder layers, a head for text and one for audio.

Parameter names are those of transformers' `HiggsAudioV2ForConditionalGeneration`, with which a test compares
the logits.

Shapes: S packed rows, B sequences, Q new positions, C hidden size, K codebooks, V codes of a codebook with BOS
and EOS, X and Y chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from audiollm.data.packing import PackedBatch
from audiollm.models.attention import BackendName, attention_backend, rotary_angles
from audiollm.models.cache import Cache, attend_cached
from audiollm.models.decoder import Attend, AttendPacked, DualFFNConfig, DualFFNLayer, Rows
from audiollm.models.kernels import RMSNorm, compute_dtype
from audiollm.models.pretrained import load_model, save_model

MODEL_TYPE = "audiollm_dual_ffn"


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
        attend = attend_cached(cache, positions_BQ, row_of_S, order_S, self.config.sliding_window)
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


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
