"""Settings of the stage `train_vae`."""

from __future__ import annotations

from pydantic import Field, model_validator

from audiollm.recipe.stages import InputPath
from audiollm.train.settings import TrainingConfig
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
    """A folder of recordings (every 20th file is held out), or samples with their split. Mono is doubled."""
    crop_frames: int = Field(32, ge=4)
    """Length of a training crop in latent frames of 46 ms."""
    latent_dim: int = Field(64, ge=1)
    mel_hidden_size: int | None = Field(None, ge=16)
    """Width at 86 Hz."""
    hidden_size: int | None = Field(None, ge=16)
    """Width at 21.5 Hz."""
    blocks: tuple[int, int, int, int] | None = None
    """ConvNeXt blocks: encoder at 86 Hz and 21.5 Hz, decoder at 21.5 Hz and 86 Hz."""
    harmonic_source: bool = True
    """The latents carry a pitch, and the decoder makes its harmonics."""
    pitch_weight: float = Field(1.0, gt=0)
    """Weight of the loss on pitch and voicing."""
    kl_weight: float = Field(1e-4, ge=0)
    """Weight of the divergence (nats per frame) beside an STFT distance of weight 1."""
    adversary_share: float | None = Field(None, ge=0, le=1)
    """Share of the steps before the discriminators begin; 1 for none. By default 0.3, and 1 for `tiny`."""

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
