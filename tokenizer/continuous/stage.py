"""The stage `train_vae` and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, required
from tokenizer.continuous.settings import TrainVAEConfig
from tokenizer.rates import VAE_HOP_SAMPLES, VAE_LATENT_RATE


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
    outputs = (
        2 * hidden + 2 * latent * (hidden + 1) + 2 * mel_hidden + 2 * (VAE_HOP_SAMPLES + 2) * (mel_hidden + 1)
    )
    return towers + inputs + strided + outputs


def _plan(config: TrainVAEConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    mel_hidden, hidden, blocks = (
        required(config.mel_hidden_size),
        required(config.hidden_size),
        required(config.blocks),
    )
    parameters = vae_parameters(mel_hidden, hidden, blocks, config.latent_dim)
    frames = required(config.batch_size) * config.crop_frames
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    steps = config.steps_for(audio_s * VAE_LATENT_RATE / frames)
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
    all_ranks=True,
    help="train the continuous 44.1 kHz stereo autoencoder from scratch",
    plan=_plan,
)
