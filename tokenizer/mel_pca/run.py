"""The work of the stage `fit_mel_pca`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from tokenizer.clips import find_training_clips
from tokenizer.continuous.data import StereoStore, write_examples
from tokenizer.mel_pca.model import MelPCA, MelPCAConfig
from tokenizer.mel_pca.settings import FitMelPCAConfig
from tokenizer.training.losses import ReconstructionLoss
from tokenizer.training.voicing import voicing_figures, warn_of_whispers

EVALUATED_CLIPS = 40


def fit_mel_pca(config: FitMelPCAConfig, context: Context) -> dict[str, Any]:
    """Fit to the training clips, save to `model`, and write before/after examples of held-out clips.

    Raises:
        ConfigError: too little audio for so many components.
    """
    clips = find_training_clips(config.audio)
    train, test = (
        StereoStore(split_clips, config.sample_rate, channels=config.channels)
        for split_clips in (clips.train, clips.test)
    )
    model = MelPCA(
        MelPCAConfig(
            sample_rate=config.sample_rate,
            channels=config.channels,
            mel_hop_samples=config.mel_hop_samples,
            num_mels=config.num_mels,
            latent_dim=config.latent_dim,
        )
    )
    count = min(config.max_clips, len(train))

    def read() -> Iterator[Tensor]:
        with context.progress("reading clips", count) as bar:
            for _, samples_CN in train.picked(count):
                yield samples_CN
                bar.advance(bar.task_ids[0])

    try:
        figures: dict[str, Any] = {"variance_kept": model.fit(read())}
    except ValueError as error:
        raise ConfigError(str(error), str(config.audio), "give more audio, or a lower latent_dim") from error
    model.save_pretrained(context.folder / "model")
    figures |= _evaluate(model, test)
    context.say("tracking the pitch of held-out clips before and after")
    figures |= voicing_figures(lambda samples_CN: model.decode(model.encode(samples_CN)), test)
    warn_of_whispers(figures, context)
    write_examples(model, test, context.folder)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "fit_mel_pca")
    set_aside.add([*clips.bad, *train.bad, *test.bad])
    return {**figures, "latent_rate": model.sample_rate / model.hop_samples, "set_aside": len(set_aside.rows)}


def _evaluate(model: MelPCA, clips: StereoStore) -> dict[str, float]:
    """Mel and STFT distance (natural-log L1) of held-out clips."""
    loss, rows = ReconstructionLoss(model.sample_rate), []
    for _, samples_CN in clips.picked(EVALUATED_CLIPS):
        made_CN = model.decode(model.encode(samples_CN), samples_CN.shape[1])
        rows.append({name: float(value) for name, value in loss(made_CN, samples_CN).items()})
    return {name: float(torch.tensor([row[name] for row in rows]).mean()) for name in rows[0]} if rows else {}
