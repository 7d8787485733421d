"""Audio encoders by the settings of a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from audiollm.data.hearing.features import FRAMES_PER_SECOND
from audiollm.errors import ConfigError, StageError
from audiollm.models.audio_encoder import AudioEncoderConfig, encoder_config
from audiollm.models.audio_stem import DEFAULT_STRIDE, FRAMES_PER_POSITION
from audiollm.recipe.stages import required
from audiollm.train.supervised_settings import AudioEncoderSettings

HEARS_UNFILLED = ((384, 4), (512, 6))
"""Width and layers of published encoders whose rows lose no words where windows end with the sound: Whisper tiny, base.
The figures are in `audiollm/supervised/features/README.md`."""


def published_encoder(settings: AudioEncoderSettings) -> AudioEncoderConfig:
    """The shape of the encoder in the folder `path`, whose windows are filled up, as it was trained.

    Raises:
        StageError: no such encoder in the folder, or settings that it cannot have.
    """
    try:
        encoder = encoder_config(required(settings.path), **window_options(settings))
        if settings.padded == "auto":
            hears_unfilled = (encoder.d_model, encoder.encoder_layers) in HEARS_UNFILLED
            encoder = replace(encoder, padded=not hears_unfilled)
        return encoder
    except (ConfigError, ValueError) as error:
        raise StageError(str(error), "see audio_encoder", 2) from error


def window_options(settings: AudioEncoderSettings) -> dict[str, Any]:
    """Fields of `AudioEncoderConfig` that settings give beside the shape of the layers."""
    options: dict[str, Any] = {
        name: getattr(settings, name) for name in ("reduction", "projector_size", "dropout")
    } | {"stride": settings.stride or DEFAULT_STRIDE[settings.stem]}
    if isinstance(settings.padded, bool):
        options["padded"] = settings.padded
    if settings.window_s is not None:
        frames_per_second = FRAMES_PER_SECOND / FRAMES_PER_POSITION[settings.stem]
        options["max_source_positions"] = round(settings.window_s * frames_per_second)
    return options
