"""Settings of the stage `train_vae`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from audiollm.recipe.stages import InputPath
from audiollm.train.settings import TrainingConfig
from tokenizer.rates import VAE_HOP_SAMPLES, VAE_SAMPLE_RATE
from tokenizer.training.settings import TokenizerSizeRule

SIZES: dict[str, TokenizerSizeRule] = {
    "tiny": TokenizerSizeRule(192, 320, (2, 4, 4, 3), 8, None, 22, 1.5e-3, 1.0),
    "small": TokenizerSizeRule(256, 512, (3, 6, 6, 4), 16, 40_000, None, 1e-3),
    "300m": TokenizerSizeRule(512, 1024, (3, 8, 8, 5), 64, 300_000, None, 4e-4),
    "1b": TokenizerSizeRule(512, 1280, (4, 10, 10, 6), 64, 600_000, None, 3e-4),
    "3b": TokenizerSizeRule(512, 1280, (4, 10, 10, 6), 128, 800_000, None, 3e-4),
}
"""Millions of parameters: 8, 25, 122, 223, 223 (Stable Audio Open's has 156)."""


class TrainVAEConfig(TrainingConfig):
    """Settings of `train_vae`. What is None follows from `size`."""

    audio: InputPath
    """A folder of recordings (every 20th file is held out), or samples with their split; mono is doubled for stereo."""
    sample_rate: int = Field(VAE_SAMPLE_RATE, ge=8000, le=192_000)
    """Samples per second of the waveform; recordings of other rates are resampled."""
    channels: Literal[1, 2] = 2
    """Channels of the waveform: mono or stereo."""
    mel_hop_samples: int = Field(VAE_HOP_SAMPLES // 4, ge=16)
    """Samples between two mel frames; a latent frame is 4 of them, and the Fourier transforms are as long."""
    crop_frames: int = Field(32, ge=4)
    """Length of a training crop in latent frames (46 ms by default)."""
    latent_dim: int = Field(64, ge=1)
    """Numbers of a latent."""
    mel_hidden_size: int | None = Field(None, ge=16)
    """Width at the mel rate (86 Hz by default)."""
    hidden_size: int | None = Field(None, ge=16)
    """Width at the latent rate (21.5 Hz by default)."""
    blocks: tuple[int, int, int, int] | None = None
    """ConvNeXt blocks: encoder at the mel and the latent rate, decoder at the latent and the mel rate."""
    harmonic_source: bool = True
    """The latents carry a pitch, and the decoder makes its harmonics."""
    phase_band_hz: float = Field(0.0, ge=0)
    """The latents carry the waveform below it, phase included, so that what is decoded matches the recording sample by
    sample there; 0: magnitudes alone."""
    pitch_weight: float = Field(1.0, gt=0)
    """Weight of the loss on pitch and voicing."""
    kl_weight: float = Field(1e-4, ge=0)
    """Weight of the divergence (nats per frame) beside an STFT distance of weight 1."""
    adversary_share: float | None = Field(None, ge=0, le=1)
    """Share of the steps before the discriminators begin; 1 for none. By default 0.3, and 1 for `tiny`."""

    @property
    def latent_rate(self) -> float:
        """Latent frames per second."""
        return self.sample_rate / (4 * self.mel_hop_samples)

    @property
    def n_fft(self) -> int:
        """Samples of a Fourier transform."""
        return 4 * self.mel_hop_samples

    @property
    def num_mels(self) -> int:
        """Mel bands: 128, fewer where a short transform would leave bands empty."""
        return min(128, self.n_fft // 8)

    @model_validator(mode="after")
    def _follow_size(self) -> TrainVAEConfig:
        rule = SIZES[self.size]
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        self.mel_hidden_size = self.mel_hidden_size or rule.mel_hidden_size
        self.hidden_size = self.hidden_size or rule.hidden_size
        self.blocks = self.blocks or rule.blocks
        if self.adversary_share is None:
            self.adversary_share = rule.adversary_share
        return self
