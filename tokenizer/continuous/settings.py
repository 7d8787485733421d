"""The stage `train_vae`: its settings, and what it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StagePlan, chosen
from audiollm.train.settings import TrainingConfig
from tokenizer.training.settings import SizeRule

LATENT_RATE = 44_100 / 2048


SIZES: dict[str, SizeRule] = {
    "tiny": SizeRule(192, 320, (2, 4, 4, 3), 8, None, 22, 1.5e-3),
    "small": SizeRule(256, 512, (3, 6, 6, 4), 16, 40_000, None, 1e-3),
    "300m": SizeRule(512, 1024, (3, 8, 8, 5), 64, 300_000, None, 4e-4),
    "1b": SizeRule(512, 1280, (4, 10, 10, 6), 64, 600_000, None, 3e-4),
    "3b": SizeRule(512, 1280, (4, 10, 10, 6), 128, 800_000, None, 3e-4),
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
    kl_weight: float = Field(1e-4, ge=0)
    """Of the divergence in nats a frame, against the STFT distance in its own units."""
    adversary_share: float = Field(0.75, ge=0, le=1)
    """Share of the steps before the discriminators begin; 1 for none."""

    @model_validator(mode="after")
    def _follow_size(self) -> TrainVAEConfig:
        rule = SIZES[self.size]
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        self.mel_hidden_size = self.mel_hidden_size or rule.mel_hidden_size
        self.hidden_size = self.hidden_size or rule.hidden_size
        self.blocks = self.blocks or rule.blocks
        return self


def _train_vae(config: TrainVAEConfig, context: Context) -> dict[str, Any]:
    from tokenizer.continuous.run import train_vae

    return train_vae(config, context)


def vae_parameters(
    mel_hidden: int, hidden: int, blocks: tuple[int, int, int, int], latent: int = 64, mels: int = 128
) -> int:
    """Trainable parameters (a test compares with the model's)."""
    at_mel, at_frame = blocks[0] + blocks[3], blocks[1] + blocks[2]
    towers = sum(
        n * (6 * width * width + 15 * width) for n, width in ((at_mel, mel_hidden), (at_frame, hidden))
    )
    inputs = 7 * 4 * mels * mel_hidden + mel_hidden + 7 * latent * hidden + hidden
    strided = 8 * mel_hidden * hidden + hidden + 4 * mel_hidden
    outputs = 2 * hidden + 2 * latent * (hidden + 1) + 2 * mel_hidden + 2 * 2050 * (mel_hidden + 1)
    return towers + inputs + strided + outputs


def _plan(config: TrainVAEConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    mel_hidden, hidden, blocks = (
        chosen(config.mel_hidden_size),
        chosen(config.hidden_size),
        chosen(config.blocks),
    )
    parameters = vae_parameters(mel_hidden, hidden, blocks, config.latent_dim)
    frames = chosen(config.batch_size) * config.crop_frames
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    steps = config.steps_for(audio_s * LATENT_RATE / frames)
    widths = 4 * mel_hidden * (blocks[0] + blocks[3]) + hidden * (blocks[1] + blocks[2])
    return StagePlan(
        parameters=parameters,
        tokens=float((steps or 0) * frames),
        memory_mb=1900 + (parameters * 16 + frames * widths * 14 * 4) / 2**20,
        disk_mb=parameters * (3 * 16 + 4) / 2**20,  # three checkpoints while one is replaced, and the model
        seconds=config.minutes * 60 if config.minutes else None,
        note=config.budget_text(),
    )


TRAIN_VAE = Stage(
    kind="train_vae",
    config=TrainVAEConfig,
    run=_train_vae,
    artifacts={"checkpoint": "model", "examples": "examples.json"},
    help="train the continuous 44.1 kHz stereo autoencoder from scratch",
    plan=_plan,
)
