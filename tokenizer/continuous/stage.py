"""The stage `train_vae` and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, required
from tokenizer.continuous.settings import TrainVAEConfig


def _train_vae(config: TrainVAEConfig, context: Context) -> dict[str, Any]:
    from tokenizer.continuous.run import train_vae

    return train_vae(config, context)


def vae_parameters(config: TrainVAEConfig) -> int:
    """Exactly, by a model of that shape on the meta device."""
    import torch

    from tokenizer.continuous.model import AudioVAE
    from tokenizer.continuous.run import vae_config

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AudioVAE(vae_config(config)).parameters())


def _plan_vae_training(config: TrainVAEConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    mel_hidden, hidden, blocks = (
        required(config.mel_hidden_size),
        required(config.hidden_size),
        required(config.blocks),
    )
    parameters = vae_parameters(config)
    frames = required(config.batch_size) * config.crop_frames
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    steps = config.steps_for(audio_s * config.latent_rate / frames)
    widths = 4 * mel_hidden * (blocks[0] + blocks[3]) + hidden * (blocks[1] + blocks[2])
    return StagePlan(
        parameters=parameters,
        tokens=float((steps or 0) * frames),
        memory_mb=1900 + (parameters * 16 + frames * widths * 14 * 4) / 2**20,
        disk_mb=parameters * (3 * 16 + 4) / 2**20,  # three checkpoints while one is replaced, and the model
        seconds=config.budget_seconds(),
        note=config.budget_text(),
    )


TRAIN_VAE = Stage(
    kind="train_vae",
    config=TrainVAEConfig,
    run=_train_vae,
    artifacts={"checkpoint": "model", "examples": "examples.json"},
    all_ranks=True,
    help="train the continuous autoencoder of sounds from scratch, at any rate",
    plan=_plan_vae_training,
)
