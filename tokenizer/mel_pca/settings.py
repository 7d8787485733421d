"""Settings of the stage `fit_mel_pca`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from audiollm.recipe.stages import InputPath, StageConfig


class FitMelPCAConfig(StageConfig):
    """Settings of `fit_mel_pca`."""

    audio: InputPath
    """A folder of recordings (every 20th file is held out), or samples with their split."""
    sample_rate: int = Field(16_000, ge=8000, le=192_000)
    """Samples per second of the waveform; recordings of other rates are resampled."""
    channels: Literal[1, 2] = 1
    """Channels of the waveform: mono or stereo."""
    mel_hop_samples: int = Field(256, ge=16)
    """Samples between two mel frames; a latent frame is 4 of them, and the Fourier transforms are as long: 64 ms at
    16 kHz. Much shorter ones do not tell the harmonics of a low voice apart: raise it with the sample rate."""
    num_mels: int = Field(128, ge=8)
    """Mel bands."""
    latent_dim: int = Field(48, ge=1)
    """Principal components of a latent frame that are kept."""
    max_clips: int = Field(4000, ge=1)
    """Training clips that are read, of at most 20 s, evenly picked."""

    @model_validator(mode="after")
    def _has_components(self) -> FitMelPCAConfig:
        numbers = 4 * self.channels * self.num_mels
        if self.latent_dim > numbers:
            raise ValueError(f"latent_dim must be at most 4 * channels * num_mels = {numbers}")
        return self
