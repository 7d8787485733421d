"""The DualFFN audio-text language model: embeddings, decoder layers, a head for text and one for audio.

Parameter names are those of transformers' `HiggsAudioV2ForConditionalGeneration`, with which a test compares
the logits.

Shapes: S packed rows, B sequences, Q new positions, C hidden size, K codebooks, V codes of a codebook with BOS
and EOS, X and Y chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from audiollm.data.hearing.features import PackedFeatures
from audiollm.data.packing import PackedBatch, SegmentLayout
from audiollm.models.appending import append_cached
from audiollm.models.attention import (
    BackendName,
    PrefixTurns,
    attention_backend,
    exact_rotary_angles,
    rotary_angles,
)
from audiollm.models.audio_encoder import AudioEncoderConfig, AudioTower, Projector
from audiollm.models.cache import AttendExtended, Cache, attend_cached, fill_cache
from audiollm.models.chunked_cross_entropy import HeadWeight
from audiollm.models.decoder import Attend, AttendPacked, DualFFNConfig, DualFFNLayer, Rows
from audiollm.models.hub import from_language_model, load_pretrained, save_pretrained
from audiollm.models.kernels import RMSNorm, matmul_dtype
from audiollm.products import Linear, linear

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from audiollm.models.model_card import ModelCard


class Head(Linear):
    """Hidden states to logits, without a bias."""

    def forward(self, hidden_XC: Tensor, use: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """The logits, or what the caller makes of the hidden states and the weight (a loss without the logits).

        A call of the module in either case, so that a strategy that shards weights finds out and gathers them.
        """
        return linear(hidden_XC, self.weight) if use is None else use(hidden_XC, self.weight)


def through_head(head: nn.Module, hidden_XC: Tensor, use: Callable[[Tensor, HeadWeight], Any]) -> Any:
    """Apply `use` to the hidden states `[X, C]` and the weight `[V, C]` of a head, plain or adapted by PEFT.

    A head with a low-rank adapter has the logits `h W' + s A(h) B'`, which are those of `[h, s A(h)]` under the weight
    `[W, B]`: `use` is given the hidden states with the adapter's rank as more columns, and the weight as these blocks.
    """
    lora: Any = head
    if not hasattr(head, "lora_A") or lora.disable_adapters or lora.merged:
        return getattr(head, "base_layer", head)(hidden_XC, use)
    adapters = [name for name in lora.active_adapters if name in lora.lora_A]

    def use_adapted(hidden_XC: Tensor, weight_VC: Tensor) -> Any:
        reduced = [
            lora.lora_A[name](lora.lora_dropout[name](hidden_XC)) * lora.scaling[name] for name in adapters
        ]
        expanded = [lora.lora_B[name].weight for name in adapters]
        return use(torch.cat([hidden_XC, *reduced], dim=1), (weight_VC, *expanded))

    return lora.base_layer(hidden_XC, use_adapted)


class AudioEmbedding(nn.Module):
    """A single embedding table for all codebooks; a position's embedding is the sum over its codes."""

    def __init__(self, config: DualFFNConfig) -> None:
        super().__init__()
        self.embed_audio_tokens = nn.Embedding(
            config.num_codebooks * config.codebook_size, config.hidden_size
        )
        # on the CPU even where a model is built on the meta device to be loaded: no file holds it
        offsets = torch.arange(config.num_codebooks, device="cpu") * config.codebook_size
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
        """Attention backend over packs in training (see `attention_backend`); elsewhere a kernel that is
        asked for may not fit (evaluations in float32), and `auto` takes its place."""
        self.activation_checkpointing = False
        """Keep only each layer's input in training, and recompute the layer in the backward pass."""
        self.weight_changes = 0
        """Number of announced weight changes (`weights_changed`)."""
        self.model = Backbone(config)
        self.text_lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.audio_lm_head = Head(config.hidden_size, config.num_codebooks * config.codebook_size, bias=False)
        if not self.text_lm_head.weight.is_meta:  # a shape without values, whose parameters are counted
            self._initialize()
        if config.audio_encoder is not None:
            self.add_audio_encoder(config.audio_encoder)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, `[S, C]`, in the batch's order of rows."""
        x_SC = self.embed_rows(batch)
        attend = self.attend_packed(batch, x_SC)
        return self._layers(x_SC, self._rows(batch, attend))

    def _initialize(self) -> None:
        self.apply(_draw_weights)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)

    def add_audio_encoder(self, config: AudioEncoderConfig) -> None:
        """An encoder of random weights, with a projector, for what is heard (`load_tower` gives it published ones)."""
        self.config = replace(self.config, audio_encoder=config)
        like = self.model.embed_tokens.weight
        self.audio_tower = AudioTower(config).to(like)
        self.audio_encoder_proj = Projector(config, self.config.hidden_size).to(like)

    def embed_rows(self, batch: PackedBatch) -> Tensor:
        """Embed all rows for the first layer, `[S, C]`, in the batch's order of rows.

        Raises:
            ValueError: features for a model without an audio encoder.
        """
        if batch.features is None:
            return self.embed(batch.text_ids_X, batch.codes_YK)
        return self.embed(batch.text_ids_X, batch.codes_YK, self.embed_features(batch.features))

    def embed_features(self, features: PackedFeatures) -> Tensor:
        """Encode and project windows of recordings, or project rows that were encoded before: `[F, C]`.

        Raises:
            ValueError: a model without an audio encoder.
        """
        if self.config.audio_encoder is None:
            raise ValueError(
                "recordings are given as features, and this model has no audio encoder: give codes"
            )
        features_FC: Tensor = features.spread(self.audio_encoder_proj(self.audio_tower(features)))
        return features_FC

    def text_logits(self, hidden_XC: Tensor) -> Tensor:
        """`[X, vocabulary]`."""
        logits: Tensor = self.text_lm_head(hidden_XC)
        return logits

    def audio_logits(self, hidden_XC: Tensor) -> Tensor:
        """`[X, K, V]`."""
        logits: Tensor = self.audio_lm_head(hidden_XC)
        return logits.unflatten(-1, (self.config.num_codebooks, self.config.codebook_size))

    def prefill(self, batch: PackedBatch, cache: Cache, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill rows of a cache with the first sequences of a pack.

        Args:
            rows: the cache row of each; what it held before is forgotten.
            lengths: positions of each; what the pack has beyond them (idle rows) is not kept.
        """
        x_SC = self.embed_rows(batch)
        attend = fill_cache(cache, batch, rows, lengths, self.attend_packed(batch, x_SC))
        self._layers(x_SC, self._rows(batch, attend))

    def append(
        self,
        text_ids_X: Tensor,
        codes_YK: Tensor,
        cache: Cache,
        counts: Sequence[int],
        order_X: Tensor | None = None,
        features_FC: Tensor | None = None,
    ) -> Tensor:
        """Extend cache row r by `counts[r]` positions at once; return hidden states: text, features, audio.

        Args:
            order_X: the number, among the new positions row after row, of each text id, then of each row of features,
                then of each row of codes; None: they are in that order.
            features_FC: new rows of `embed_features`.

        Raises:
            ValueError: no new position, a row of the cache is full, or more positions than a row that forgets takes.
        """
        attend = append_cached(cache, self.config, counts, order_X)
        x_XC = self.embed(text_ids_X, codes_YK, features_FC)
        cosine, sine = attend.cosine_XD[:, None], attend.sine_XD[:, None]
        return self._layers(x_XC, Rows(len(x_XC) - len(codes_YK), cosine, sine, attend))

    def extend(
        self, text_ids_X: Tensor, codes_YK: Tensor, cache: Cache, order_R: Tensor | None = None
    ) -> Tensor:
        """Extend each of the first X + Y cache rows by a position; return hidden states, text first, then audio.

        Args:
            order_R: the cache row of each text id, then of each row of codes; None: rows 0, 1, 2, ...

        Raises:
            ValueError: a row of the cache is full.
        """
        attend = attend_cached(cache, len(text_ids_X) + len(codes_YK), order_R)
        return self.extend_by(text_ids_X, codes_YK, cache, attend)

    def extend_by(self, text_ids_X: Tensor, codes_YK: Tensor, cache: Cache, attend: AttendExtended) -> Tensor:
        """Compute the hidden states of `extend` with this attention over the cache."""
        x_RC = self.embed(text_ids_X, codes_YK)
        cosine, sine = (table[attend.position_X] for table in (cache.cosine_LD, cache.sine_LD))
        return self._layers(x_RC, Rows(len(text_ids_X), cosine[:, None], sine[:, None], attend))

    def weights_changed(self) -> None:
        """Announce that weights were written in place, so that copies of them (`packed_decoder`) are made anew.

        Fused optimizers and writes through `.data` leave no trace on the tensors. The training loop and
        `merge_adapter` announce; whoever else writes weights calls this.
        """
        self.weight_changes += 1

    def empty_copy(self, device: torch.device, dtype: torch.dtype = torch.float32) -> DualFFN:
        """Return a model of this config in eval mode with weights to be overwritten; keeps random state."""
        with torch.random.fork_rng(devices=[]):
            empty = DualFFN(self.config)
        return empty.to(device, dtype).requires_grad_(False).eval()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of words (Hugging Face's name for it)."""
        return self.model.embed_tokens

    def gradient_checkpointing_enable(self) -> None:
        """Compute the layers' activations again in the backward pass (Hugging Face's name for it)."""
        self.activation_checkpointing = True

    def save_pretrained(
        self, folder: Path | str, tokenizer: Tokenizer | None = None, card: ModelCard | None = None
    ) -> None:
        """Write a folder in Hugging Face's layout: see `hub.save_pretrained`."""
        save_pretrained(self, folder, tokenizer, card)

    @classmethod
    def from_pretrained(cls, folder: Path | str, dtype: torch.dtype | None = torch.float32) -> DualFFN:
        """Load a folder, ours, Hugging Face's or Boson's, or a `train` stage's: see `hub.load_pretrained`."""
        return load_pretrained(cls, folder, dtype)

    @classmethod
    def from_language_model(
        cls,
        folder: Path | str,
        num_codebooks: int = 8,
        codebook_size: int = 1026,
        audio_ffn_layers: Iterable[int] | None = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> DualFFN:
        """Build on a plain Llama, Qwen2 or Qwen3: see `hub.from_language_model`."""
        return from_language_model(cls, folder, num_codebooks, codebook_size, audio_ffn_layers, dtype)

    def embed(self, text_ids_X: Tensor, codes_YK: Tensor, features_FC: Tensor | None = None) -> Tensor:
        """Text rows, features where there are some, then audio rows."""
        text_XC = self.model.embed_tokens(text_ids_X)
        features = [] if features_FC is None else [features_FC.to(text_XC.dtype)]
        return torch.cat([text_XC, *features, self.model.embed_audio_tokens(codes_YK)])

    def attend_packed(self, batch: PackedBatch, x_SC: Tensor) -> AttendPacked:
        requested = self.attention if self.training or self.attention == "sdpa" else "auto"
        backend = attention_backend(x_SC.device, matmul_dtype(x_SC), self.config.head_dim, requested)
        return AttendPacked(batch.layout, self.config, backend.name, self._turns(batch.layout))

    def _turns(self, layout: SegmentLayout) -> PrefixTurns | None:
        config = self.config
        if not layout.pinned_rows or config.sliding_window is None:
            return None
        rotary = config.head_dim, config.rope_theta, config.rope_scaling
        return PrefixTurns.of(layout, config.sliding_window, *rotary)

    def row_angles(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return rotary cosine and sine `[S, D]` of a pack's rows; exact ones where sequences keep a prefix."""
        config = self.config
        angles = exact_rotary_angles if batch.layout.pinned_rows else rotary_angles
        return angles(batch.positions_S, config.head_dim, config.rope_theta, config.rope_scaling)

    def _rows(self, batch: PackedBatch, attend: Attend) -> Rows:
        cosine, sine = self.row_angles(batch)
        return Rows(batch.num_text, cosine[:, None], sine[:, None], attend)

    def _layers(self, x_SC: Tensor, rows: Rows) -> Tensor:
        """All layers and the last norm."""
        again = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.model.layers:
            x_SC = checkpoint(layer, x_SC, rows, use_reentrant=False) if again else layer(x_SC, rows)
        normed: Tensor = self.model.norm(x_SC)
        return normed


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
