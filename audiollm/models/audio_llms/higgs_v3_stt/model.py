"""Higgs Audio v3 STT over transformers' Whisper layers and Qwen3, under its published names.

The remote code beside the published weights runs on transformers 4.51 alone. A chunk's rows are those that it has
alone: what pads it beside longer ones is masked in the convolutions and in the attention.

Shapes: A conversations, L tokens, R chunks, M mel bands, F mel frames, P positions of the encoder, D, E hidden sizes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, Qwen3Model
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from audiollm.models.audio_llms.higgs_v3_stt.config import HiggsAudio3Config

PROJECTOR_WIDTH = 2048
_GENERATION_ONLY = (r"audio_codebook_embeddings\..*", r"audio_decoder_proj\.audio_lm_head\..*")
"""Stored weights that recognition does not use."""


class HiggsAudioTower(nn.Module):
    """Whisper's encoder, whose positions are averaged in pairs before the last norm: 25 rows per second."""

    def __init__(self, config: HiggsAudio3Config) -> None:
        super().__init__()
        encoder = config.encoder
        self.conv1 = nn.Conv1d(encoder.num_mel_bins, encoder.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(encoder.d_model, encoder.d_model, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(encoder.max_source_positions, encoder.d_model)
        self.embed_positions.requires_grad_(False)
        self.layers = nn.ModuleList(WhisperEncoderLayer(encoder) for _ in range(encoder.encoder_layers))
        self.layer_norm = nn.LayerNorm(encoder.d_model)

    def forward(self, input_features: Tensor, input_features_mask: Tensor) -> BaseModelOutput:
        """Encode chunks.

        Args:
            input_features: log-mel `[R, M, F]`.
            input_features_mask: `[R, F]`, 1 for frames of the chunk and 0 behind them.

        Returns:
            Rows `[R, P // 2, E]`, zero behind `pooled_lengths` of each chunk.
        """
        mask_R1F = input_features_mask[:, None].to(input_features.dtype)
        hidden_REF = functional.gelu(self.conv1(input_features * mask_R1F)) * mask_R1F
        hidden_RPE = functional.gelu(self.conv2(hidden_REF)).transpose(1, 2)
        hidden_RPE = hidden_RPE + self.embed_positions.weight[: hidden_RPE.shape[1]]
        is_heard_RP = _leading_mask(_num_positions(input_features_mask.sum(dim=1)), hidden_RPE.shape[1])
        for layer in self.layers:
            hidden_RPE = layer(hidden_RPE, is_heard_RP[:, None, None])
        pairs = hidden_RPE.shape[1] // 2
        pooled_RPE = hidden_RPE[:, : 2 * pairs].unflatten(1, (pairs, 2)).mean(dim=2)
        is_row_RP = _leading_mask(pooled_lengths(input_features_mask), pairs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(pooled_RPE) * is_row_RP[..., None])


class HiggsAudioProjector(nn.Module):
    """Halves the rate of rows, and maps them to the decoder's width."""

    def __init__(self, config: HiggsAudio3Config) -> None:
        super().__init__()
        width = config.encoder.d_model
        self.temporal = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1, groups=width)
        self.linear1 = nn.Linear(width, PROJECTOR_WIDTH)
        self.linear2 = nn.Linear(PROJECTOR_WIDTH, config.hidden_size)

    def forward(self, encoded_RPE: Tensor) -> Tensor:
        """Map `[R, P, E]` to `[R, ceil(P / 2), D]`."""
        halved_RPE = self.temporal(encoded_RPE.transpose(1, 2)).transpose(1, 2)
        return self.linear2(functional.relu(self.linear1(halved_RPE)))


class HiggsAudio3Model(Qwen3Model, GenerationMixin):
    """Writes what is said in a recording; its text head is a matrix of its own, whatever config.json says of a tie."""

    config_class = HiggsAudio3Config
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*_GENERATION_ONLY]
    writes_published_files = True
    """Saved into files like those that it was loaded from, tensor by tensor."""

    def __init__(self, config: HiggsAudio3Config) -> None:
        super().__init__(config)
        self.audio_tower = HiggsAudioTower(config)
        self.audio_encoder_proj = HiggsAudioProjector(config)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.audio_decoder_proj = nn.ModuleDict({"text_lm_head": head})
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See `PreTrainedModel.from_pretrained`. Weights of another shape are told in the loading info, by name."""
        has_info = bool(kwargs.get("output_loading_info"))
        loaded = super().from_pretrained(*args, **kwargs, ignore_mismatched_sizes=has_info)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.audio_tower.embed_positions.requires_grad_(False)  # loading makes constants trainable
        return loaded

    def get_output_embeddings(self) -> nn.Module:
        """See `PreTrainedModel.get_output_embeddings`."""
        return self.audio_decoder_proj["text_lm_head"]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits `[A, L, V]`.

        Args:
            input_ids: `[A, L]`, with a token that stands for sound at each row of it.
            input_features, input_features_mask: see `HiggsAudioTower.forward`; chunks in the order of their tokens.
            logits_to_keep: last positions whose logits are computed; 0: all.

        Raises:
            ValueError: there are more or fewer rows of sound than tokens that stand for them.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_tokens(input_ids)
            if input_features is not None:
                rows_ND = self.audio_rows(input_features, input_features_mask)
                inputs_embeds = _put_rows(inputs_embeds, input_ids == self.config.audio_token_id, rows_ND)
        outputs = super().forward(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        hidden_ALD = outputs.last_hidden_state[:, -logits_to_keep:]
        logits_ALV = self.get_output_embeddings()(hidden_ALD)
        model_outputs = {key: value for key, value in outputs.items() if key != "last_hidden_state"}
        return CausalLMOutputWithPast(logits=logits_ALV, **model_outputs)

    def audio_rows(self, input_features: Tensor, input_features_mask: Tensor | None) -> Tensor:
        """Encode chunks to rows `[N, D]` of the decoder, chunk after chunk; see `HiggsAudioTower.forward`."""
        if input_features_mask is None:
            raise ValueError("input_features need their input_features_mask")
        encoded_RPE = self.audio_tower(input_features, input_features_mask).last_hidden_state
        rows_RPD = self.audio_encoder_proj(encoded_RPE)
        lengths_R = (pooled_lengths(input_features_mask) + 1) // 2
        return rows_RPD[_leading_mask(lengths_R, rows_RPD.shape[1])]

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `GenerationMixin.prepare_inputs_for_generation`: recordings are read with the prompt alone."""
        features = {key: kwargs.pop(key, None) for key in ("input_features", "input_features_mask")}
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if kwargs.get("is_first_iteration", False) or not kwargs.get("use_cache", True):
            inputs |= features
        return inputs


def pooled_lengths(input_features_mask: Tensor) -> Tensor:
    """Rows `[R]` that the tower makes of chunks, by the mask `[R, F]` of their frames."""
    return _num_positions(input_features_mask.sum(dim=1)) // 2


def _num_positions(frames_R: Tensor) -> Tensor:
    return (frames_R + 1) // 2


def _leading_mask(lengths_R: Tensor, size: int) -> Tensor:
    """True at the first places of each row, `[R, size]`."""
    return torch.arange(size, device=lengths_R.device) < lengths_R[:, None]


def _put_rows(embedded_ALD: Tensor, is_audio_AL: Tensor, rows_ND: Tensor) -> Tensor:
    places = int(is_audio_AL.sum())
    if places != len(rows_ND):
        raise ValueError(f"{len(rows_ND)} rows of sound for {places} tokens that stand for them")
    return embedded_ALD.masked_scatter(is_audio_AL[..., None], rows_ND.to(embedded_ALD.dtype))
