"""The config.json of Higgs Audio v3 STT as a config of transformers' Qwen3, with the encoder's beside it.

Sources: `mlx-audio` 0.6.2 `stt/models/higgs_audio_3`, sgl-project/sglang-omni#1020. Their readings of the published
config.json: 4 s chunks, one span of rows for all chunks of a recording, and a tie of the text head that the weights
contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config, WhisperConfig

MODEL_TYPE = "higgs_audio_3"
SAMPLE_RATE = 16_000
MELS_PER_SECOND = 100
MELS_PER_POSITION = 2
"""Mel frames per position of the encoder."""
_ENCODER = {
    "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "d_model": 1280,
    "max_source_positions": 1500,
}  # fmt: skip
"""Whisper-large-v3, for what config.json leaves out."""
_ONLY = {
    "audio_adapter_type": ("stack", None), "projector_type": ("mlp", None), "projector_temporal_downsample": (2,),
    "audio_decoder_proj_num_layers": (0, None), "encode_whisper_embed": (True, None), "skip_audio_tower": (False, None),
    "encode_audio_in_tokens": (False, None), "duplicate_audio_triplet": (False, None),
}  # fmt: skip
"""Settings of config.json, and the values with which a model is computed as it is here."""


class HiggsAudio3Config(Qwen3Config):
    """Fields of `text_config` at the top, with those of the audio; made by `from_dict` of a published config.json."""

    model_type = MODEL_TYPE
    default_theta = 1_000_000.0

    audio_encoder_config: Any = None
    audio_in_token_idx: int = 151672
    chunk_size_seconds: float = 4.0
    answer_after_think: bool = False
    """Whether answers begin after an empty block of thoughts, which then ends the prompt."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See `PreTrainedConfig.from_dict`.

        Raises:
            ValueError: a setting of a model that is computed in another way.
        """
        return super().from_dict(_flat_settings(config_dict), **kwargs)

    @property
    def audio_token_id(self) -> int:
        """The token that stands for a row of sound."""
        return self.audio_in_token_idx

    @property
    def encoder(self) -> WhisperConfig:
        """The encoder's sizes, for transformers' layers; it has no dropout."""
        settings = {
            **_ENCODER,
            **{key: self.audio_encoder_config.get(key, value) for key, value in _ENCODER.items()},
        }
        activation = self.audio_encoder_config.get("activation_function", "gelu")
        config = WhisperConfig(**settings, activation_function=activation)
        config._attn_implementation = "sdpa"
        return config

    @property
    def chunk_samples(self) -> int:
        """Samples of a whole chunk."""
        return int(self.chunk_size_seconds * SAMPLE_RATE)


def _flat_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError("config.json of a higgs_audio_3 has no text_config")
    encoder = dict(data.get("audio_encoder_config") or {})
    parts = (("text_config", text, "qwen3"), ("audio_encoder_config", encoder, "higgs_audio_encoder"))
    for name, settings, known_type in parts:
        if settings.get("model_type", known_type) != known_type:
            raise ValueError(
                f"{name}.model_type is {settings['model_type']!r}, and only {known_type} is known here"
            )
    for key, allowed in _ONLY.items():
        if key in data and data[key] not in allowed:
            raise ValueError(f"{key}: {data[key]!r} is not known here, only {allowed[0]!r}")
    nested = {key: value for key, value in text.items() if value is not None and key != "model_type"}
    outer = {
        key: value
        for key, value in data.items()
        if value is not None and key not in ("text_config", "auto_map")
    }
    flat = {**nested, **outer, "audio_encoder_config": encoder, "tie_word_embeddings": False}
    chunk_s = float(flat.get("chunk_size_seconds", HiggsAudio3Config.chunk_size_seconds))
    positions = int(encoder.get("max_source_positions", _ENCODER["max_source_positions"]))
    longest_s = positions * MELS_PER_POSITION / MELS_PER_SECOND
    if not 0 < chunk_s <= longest_s:
        raise ValueError(
            f"chunk_size_seconds: {chunk_s:g} is outside of what the encoder takes, 0 to {longest_s:g}"
        )
    return {**flat, "chunk_size_seconds": chunk_s}
