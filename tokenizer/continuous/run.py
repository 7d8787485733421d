"""The work of the stage `train_vae`. Called on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from audiollm.devices import default_device
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.train.loop.loop import train
from tokenizer.clips import find_training_clips
from tokenizer.continuous.data import StereoStore, write_examples
from tokenizer.continuous.model import AudioVAE, VAEConfig
from tokenizer.continuous.settings import TrainVAEConfig
from tokenizer.continuous.task import VAETask, VAETaskConfig, evaluate_vae
from tokenizer.training.discriminators import TINY, DiscriminatorConfig
from tokenizer.training.losses import ReconstructionLoss
from tokenizer.training.voicing import voicing_figures, warn_of_whispers

MEASURED_CLIPS = 200
"""Training clips from which the latents' mean and deviation are taken."""


def train_vae(config: TrainVAEConfig, context: Context) -> dict[str, Any]:
    """Train, measure the latents, save to `model`, and write before/after examples of held-out clips.

    Every rank trains; the first one does the rest, and it alone writes.
    """
    device, ranks = default_device(), context.ranks
    shape = vae_config(config)
    clips = find_training_clips(config.audio)
    stores = {
        name: StereoStore(split_clips, shape.sample_rate, channels=shape.channels)
        for name, split_clips in (("train", clips.train), ("test", clips.test))
    }
    step_s = required(config.batch_size) * config.crop_frames / config.latent_rate
    steps = config.steps_for(stores["train"].duration_s / step_s)
    torch.manual_seed(config.seed)
    model = AudioVAE(shape).to(device)
    task = VAETask(model, stores["train"], stores["test"], _make_vae_task_config(config), ranks)
    loop = config.loop_config(steps, ema_decay=0.99, evaluations=8)
    figures = train(task, loop, context.folder, context, device)
    found_bad = [bad for rank_bad in ranks.gather(stores["train"].bad) for bad in rank_bad]
    if ranks.first:
        figures |= _finish_vae(model, stores, context, device)
        warn_of_whispers(figures, context)
        set_aside = SetAside(context.folder / "set_aside.jsonl", "train_vae")
        set_aside.add([*clips.bad, *stores["train"].bad, *stores["test"].bad, *found_bad])
        figures["set_aside"] = len(set_aside.rows)
    ranks.barrier()
    return figures


def _finish_vae(
    model: AudioVAE, stores: Mapping[str, StereoStore], context: Context, device: torch.device
) -> dict[str, Any]:
    """Measure the latents, evaluate, save and write the examples. Returns the figures."""
    folder = context.folder
    model.measure_latents(samples_CN for _, samples_CN in stores["train"].picked(MEASURED_CLIPS))
    loss = ReconstructionLoss(model.sample_rate).to(device)
    figures: dict[str, Any] = evaluate_vae(model, stores["test"], loss)
    model.cpu().save_pretrained(folder / "model")
    figures["latent_rate"] = model.latent_rate
    context.say("tracking the pitch of held-out clips before and after")
    figures |= voicing_figures(lambda samples_CN: model.decode(model.encode(samples_CN)), stores["test"])
    write_examples(model, stores["test"], folder)
    return figures


def vae_config(config: TrainVAEConfig) -> VAEConfig:
    """The shape that the settings ask for."""
    blocks = required(config.blocks)
    return VAEConfig(
        sample_rate=config.sample_rate,
        channels=config.channels,
        mel_hop_samples=config.mel_hop_samples,
        n_fft=config.n_fft,
        num_mels=config.num_mels,
        latent_dim=config.latent_dim,
        mel_hidden_size=required(config.mel_hidden_size),
        hidden_size=required(config.hidden_size),
        encoder_layers=blocks[:2],
        decoder_layers=blocks[2:],
        harmonic_source=config.harmonic_source,
        phase_band_hz=config.phase_band_hz,
    )


def _make_vae_task_config(config: TrainVAEConfig) -> VAETaskConfig:
    return VAETaskConfig(
        seed=config.seed,
        batch_size=required(config.batch_size),
        crop_frames=config.crop_frames,
        kl_weight=config.kl_weight,
        pitch_weight=config.pitch_weight if config.harmonic_source else 0.0,
        adversary_share=required(config.adversary_share),
        discriminators=TINY if config.size == "tiny" else DiscriminatorConfig(),
    )
