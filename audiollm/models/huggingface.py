"""DualFFN as a transformers model over padded inputs, registered with `AutoConfig`, `AutoModel` and
`AutoModelForTextToWaveform` (the classes that hold Higgs Audio V2) when this module is imported.

Not with `AutoModelForCausalLM`: as in Higgs Audio V2, `logits` are those of audio codes. It computes with `DualFFN`
and with nothing of its own; to generate there is `audiollm.generation`.

Shapes: B sequences, S positions with padding, N positions without, F frames with padding, K codebooks, V codes of a
codebook, W windows of features, M mel bins, X mel frames of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForTextToWaveform, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.hearing.features import FeatureShape, FeatureWindow
from audiollm.data.packing import pack
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import AudioEmbedding, DualFFN
from audiollm.models.layouts import OURS, config_of, transformers_config


class DualFFNPreTrainedConfig(PreTrainedConfig):
    """The fields of config.json: those of `HiggsAudioV2Config` and what that class has no field for."""

    model_type = OURS

    def __init__(self, **fields: Any) -> None:
        defaults = transformers_config(DualFFNConfig(vocab_size=128_256, qk_norm=True), None)
        del defaults["architectures"], defaults["model_type"]
        super().__init__(**{**defaults, "qk_norm": False, **fields})

    @classmethod
    def of(cls, config: DualFFNConfig, **special_ids: int | None) -> DualFFNPreTrainedConfig:
        """Build the config of a DualFFN; `audio_token_id` and the other ids are those of its vocabulary."""
        return cls(**{**transformers_config(config, None), "model_type": OURS, **special_ids})

    @property
    def dual_ffn(self) -> DualFFNConfig:
        """Raises: ConfigError: fields that a DualFFN cannot have."""
        return config_of({**self.to_dict(), "model_type": OURS}, "config")


@dataclass
class DualFFNOutput(ModelOutput):
    """Output of `DualFFNForConditionalGeneration`; zero at padded positions."""

    loss: Tensor | None = None
    """The mean over text targets plus the sum over codebooks of the means over their targets."""
    logits: Tensor | None = None
    """Logits of audio codes, `[B, S, K * V]`."""
    text_logits: Tensor | None = None
    """`[B, S, vocabulary]`."""


class DualFFNForConditionalGeneration(PreTrainedModel):
    """`DualFFN` with the inputs, the labels and the loss of transformers' `HiggsAudioV2ForConditionalGeneration`."""

    config_class = DualFFNPreTrainedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DualFFNLayer"]  # noqa: RUF012  transformers' name for it

    def __init__(self, config: DualFFNPreTrainedConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        network = DualFFN(config.dual_ffn)
        for name, module in network.named_children():
            self.add_module(name, module)
        self._network = (network,)  # in a tuple: its parts are this model's, and it is none of them
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        audio_input_ids: Tensor | None = None,
        audio_input_ids_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        feature_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        audio_labels: Tensor | None = None,
    ) -> DualFFNOutput:
        """Logits of text and of audio at every position, and the loss if there are labels.

        Args:
            input_ids: `[B, S]`; audio positions hold the config's `audio_token_id`, `audio_delay_token_id` or
                `audio_in_token_id`.
            attention_mask: `[B, S]`, 0 where padded, on either side.
            audio_input_ids: `[B, F, K]`, the delayed codes of a sequence's audio positions, in order.
            audio_input_ids_mask: `[B, F]`, false where padded.
            input_features: `[W, M, X]`, for a model with an audio encoder: the log-mel windows of the
                `audio_in_token_id` positions, in order.
            feature_attention_mask: `[W, X]`, 0 where padded.
            labels: `[B, S]`, unshifted, -100 where there is no target.
            audio_labels: `[B, F, K]`, as `audio_input_ids`.

        Raises:
            ValueError: another number of frames, or of rows of features, than of audio positions.
        """
        is_real_BS = (
            torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        )
        kinds_BS = self._kinds(input_ids) * is_real_BS
        is_audio_BS = kinds_BS == Kind.AUDIO_OUT
        codes_BSK = self._spread(audio_input_ids, audio_input_ids_mask, is_audio_BS, 0)
        windows = self._windows(input_features, feature_attention_mask)
        streams = _streams(input_ids, codes_BSK, kinds_BS, is_real_BS, windows)
        batch = pack(streams).to(input_ids.device)
        network = self._dual_ffn()
        hidden_NC = network(batch)[batch.row_of_S][: sum(map(len, streams))]
        logits = _padded(self.audio_lm_head(hidden_NC), is_real_BS)
        text_logits = _padded(self.text_lm_head(hidden_NC), is_real_BS)
        losses = []
        if labels is not None:
            losses.append(_next_token_loss(text_logits, labels))
        if audio_labels is not None:
            labels_BSK = self._spread(audio_labels, audio_input_ids_mask, is_audio_BS, IGNORE)
            books = logits.unflatten(-1, (network.config.num_codebooks, -1)).unbind(2)
            losses += [
                _next_token_loss(*codebook) for codebook in zip(books, labels_BSK.unbind(2), strict=True)
            ]
        return DualFFNOutput(torch.stack(losses).sum() if losses else None, logits, text_logits)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.text_lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.text_lm_head = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, AudioEmbedding):  # transformers fills such buffers with what lies in memory
            module.offsets_K.copy_(torch.arange(self.config.num_codebooks) * self.config.codebook_size)
        else:
            super()._init_weights(module)

    def _dual_ffn(self) -> DualFFN:
        """Build a DualFFN of this model's current parts, which an adapter or a quantization may have replaced."""
        (network,) = self._network
        for name, module in self.named_children():
            network.add_module(name, module)
        network.training = self.training
        network.activation_checkpointing = self.gradient_checkpointing
        return network

    def _kinds(self, input_ids_BS: Tensor) -> Tensor:
        config = self.config
        kinds_BS = torch.zeros_like(input_ids_BS)
        for name in ("audio_token_id", "audio_delay_token_id", "audio_in_token_id"):
            is_input_audio = name == "audio_in_token_id" and config.audio_encoder is not None
            kinds_BS[input_ids_BS == getattr(config, name)] = int(
                Kind.FEATURE if is_input_audio else Kind.AUDIO_OUT
            )
        return kinds_BS

    def _spread(self, frames_BFK: Tensor | None, mask_BF: Tensor | None, at_BS: Tensor, empty: int) -> Tensor:
        """Frames to their positions, `[B, S, K]`."""
        spread_BSK = at_BS.new_full((*at_BS.shape, self.config.num_codebooks), empty, dtype=torch.long)
        counts = at_BS.sum(dim=1).tolist()
        frames = [0] * len(counts)
        if frames_BFK is not None:
            mask_BF = torch.ones_like(frames_BFK[..., 0]) if mask_BF is None else mask_BF
            frames = (mask_BF != 0).sum(dim=1).tolist()
        for number, (num_positions, num_frames) in enumerate(zip(counts, frames, strict=True)):
            if num_positions != num_frames:
                raise ValueError(
                    f"sequence {number} has {num_positions} audio positions and {num_frames} frames of codes"
                )
        if frames_BFK is not None and mask_BF is not None:
            spread_BSK[at_BS] = frames_BFK[mask_BF != 0]
        return spread_BSK

    def _windows(self, mel_WMX: Tensor | None, mask_WX: Tensor | None) -> list[FeatureWindow]:
        encoder = self.config.dual_ffn.audio_encoder
        if mel_WMX is None:
            return []
        if encoder is None:
            raise ValueError("input_features are given, but this model has no audio encoder")
        frames = [mel_WMX.shape[2]] * len(mel_WMX) if mask_WX is None else (mask_WX != 0).sum(dim=1).tolist()
        return [
            _window(mel_MX, num_frames, encoder.features)
            for mel_MX, num_frames in zip(mel_WMX, frames, strict=True)
        ]


def _window(mel_MX: Tensor, frames: int, shape: FeatureShape) -> FeatureWindow:
    rows = -(-frames // shape.frames_per_row)
    return FeatureWindow(mel_MX if shape.padded else mel_MX[:, : rows * shape.frames_per_row], rows)


def _streams(
    ids_BS: Tensor, codes_BSK: Tensor, kinds_BS: Tensor, is_real_BS: Tensor, windows: Sequence[FeatureWindow]
) -> list[TokenStream]:
    """The sequences without their padding, on the CPU, where packs are made."""
    ids_BS, codes_BSK, kinds_BS, is_real_BS = (
        tensor.cpu() for tensor in (ids_BS, codes_BSK, kinds_BS, is_real_BS)
    )
    streams, remaining = [], [FeatureWindow(window.mel_MF.cpu(), window.rows) for window in windows]
    for number, is_real_S in enumerate(is_real_BS):
        ids_N, codes_NK, kinds_N = (tensor[number][is_real_S] for tensor in (ids_BS, codes_BSK, kinds_BS))
        rows = int((kinds_N == Kind.FEATURE).sum())
        sequence_windows: list[FeatureWindow] = []
        while remaining and sum(window.rows for window in sequence_windows) < rows:
            sequence_windows.append(remaining.pop(0))
        if sum(window.rows for window in sequence_windows) != rows:
            row_counts = [window.rows for window in sequence_windows]
            raise ValueError(
                f"sequence {number} has {rows} positions of features and windows of {row_counts} rows"
            )
        no_text_N, no_audio_NK = torch.full_like(ids_N, IGNORE), torch.full_like(codes_NK, IGNORE)
        streams.append(TokenStream(ids_N, codes_NK, kinds_N, no_text_N, no_audio_NK, tuple(sequence_windows)))
    if remaining:
        raise ValueError(f"{len(remaining)} windows of features more than positions for them")
    return streams


def _padded(rows_N: Tensor, is_real_BS: Tensor) -> Tensor:
    padded = rows_N.new_zeros(*is_real_BS.shape, rows_N.shape[-1])
    padded[is_real_BS] = rows_N
    return padded


def _next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The mean over targets in float32; 0 where there is none."""
    targets = labels_BS[:, 1:].flatten()
    total = functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE, reduction="sum"
    )
    return total / (targets != IGNORE).sum().clamp_min(1)


AutoConfig.register(OURS, DualFFNPreTrainedConfig)
AutoModel.register(DualFFNPreTrainedConfig, DualFFNForConditionalGeneration)
AutoModelForTextToWaveform.register(DualFFNPreTrainedConfig, DualFFNForConditionalGeneration)
