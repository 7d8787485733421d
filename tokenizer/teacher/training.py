"""Training a semantic teacher from scratch, on nothing but recordings: masked prediction of k-means mel units.

HuBERT's recipe, first iteration (arXiv 2106.07447). No label and no held-out clip takes part: the held-out clips
are only scored, so that the log shows whether what is learned holds for other recordings.

Shapes: B crops, N samples, L mel frames, T frames at 25 Hz, U units a frame, V number of units,
F frames picked by the mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context
from audiollm.train.loop.loop import LoopConfig, Update, step_generator, train
from audiollm.train.loop.optim import Precision
from tokenizer.clips import ClipStore, random_crops
from tokenizer.quantizers.codebooks import kmeans
from tokenizer.rates import HOP_SAMPLES
from tokenizer.teacher.model import MelUnitConfig, MelUnitEncoder, SemanticTeacher, save_teacher

CROP_FRAMES = 75
FIGURES = ("masked_loss", "masked_accuracy", "unigram_entropy")
"""Held-out scores; the last is the loss of a prediction that ignores its input."""


@dataclass(frozen=True)
class TeacherTrainingConfig:
    """Settings of training a teacher. The budget is one of `steps`, `minutes` and `cpu_minutes`, as in the loop."""

    steps: int | None = None
    minutes: float | None = None
    cpu_minutes: float | None = None
    seed: int = 0
    model: MelUnitConfig = field(default_factory=MelUnitConfig)
    batch_size: int = 16
    crop_frames: int = CROP_FRAMES
    """Length of a crop in 40 ms frames."""
    learning_rate: float = 2e-3
    masked_share: float = 0.48
    masked_span: int = 7
    """Length of a hidden span in 40 ms frames; spans may overlap."""
    visible_weight: float = 1.0
    """Weight of the loss on frames that are not hidden, beside 1 on the hidden ones.

    HuBERT settles on 0, for long training. In a few minutes that gives features from which digits and sounds are
    told worse than from an untrained network's.
    """
    unit_batches: int = 15
    """Batches that the units are clustered on."""
    statistics_batches: int = 20
    """Batches that the features' mean and standard deviation are measured on."""
    precision: Precision = "auto"
    checkpoint_seconds: float = 20.0


class TrainedTeacher(NamedTuple):
    """The result of `train_teacher`."""

    teacher: SemanticTeacher
    cpu_seconds: float
    """CPU time of the training steps."""
    figures: dict[str, float]
    """The `FIGURES`, on held-out crops."""


def train_teacher(
    store: ClipStore,
    held_out: ClipStore,
    config: TeacherTrainingConfig,
    folder: Path,
    context: Context,
    device: torch.device,
) -> TrainedTeacher:
    """Cluster units, train, measure the features' statistics, and save to `folder/model`.

    Resumes from `folder/checkpoint`; the units are drawn from the seed and come out the same.

    Args:
        store: the training clips at 24 kHz; they alone are fitted.
        held_out: clips to score on.
        folder: where checkpoints, curves and the model go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    encoder = MelUnitEncoder(config.model).to(device)
    fit_units(encoder, store, config)
    task = MelUnitTask(encoder, store, held_out, config)
    loop = LoopConfig(
        seed=config.seed,
        steps=config.steps,
        minutes=config.minutes,
        cpu_minutes=config.cpu_minutes,
        learning_rate=config.learning_rate,
        default_warmup_steps=50,
        ema_decay=0.99,
        precision=config.precision,
        evaluate_every=200,
        checkpoint_seconds=config.checkpoint_seconds,
    )
    done = train(task, loop, folder, context, device)
    teacher = SemanticTeacher(encoder)
    fit_statistics(teacher, store, config.seed, config.statistics_batches)
    save_teacher(teacher, folder / "model")
    figures = {key: float(done[key]) for key in FIGURES}  # the last evaluation was of these weights
    context.say(
        f"teacher: masked loss {figures['masked_loss']:.2f} on held-out audio, "
        f"{figures['unigram_entropy']:.2f} without having learned"
    )
    return TrainedTeacher(teacher, float(done["cpu_seconds"]), figures)


class MelUnitTask:
    """A `Task` of the training loop: predict the units of hidden frames."""

    def __init__(
        self, encoder: MelUnitEncoder, store: ClipStore, held_out: ClipStore, config: TeacherTrainingConfig
    ) -> None:
        self.encoder, self.config = encoder, config
        self._store, self._held_out = store, held_out
        self._device = encoder.band_mean_M.device

    def modules(self) -> dict[str, nn.Module]:
        return {"teacher": self.encoder}

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["teacher"]}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        """The first rank alone trains a teacher, so its module comes unwrapped."""

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
        """Crops `[B, N]` and which of their frames to hide `[B, T]`."""
        return self._draw(self._store, generator)

    def updates(self, batch: tuple[Tensor, Tensor], step: int, steps: int) -> Iterator[Update]:
        logits_BTUV, units_BTU = self._predict(batch)
        mask_BT = batch[1]
        masked = _unit_loss(logits_BTUV[mask_BT], units_BTU[mask_BT])
        visible = _unit_loss(logits_BTUV[~mask_BT], units_BTU[~mask_BT])
        accuracy = _accuracy(logits_BTUV[mask_BT], units_BTU[mask_BT])
        figures = {"masked_loss": masked, "visible_loss": visible, "masked_accuracy": accuracy}
        yield Update(masked + self.config.visible_weight * visible, figures)

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and accuracy on hidden frames of held-out crops, beside the entropy of the units there."""
        logits, units = [], []
        for index in range(4):
            batch = self._draw(self._held_out, step_generator(self.config.seed, index, "held-out crops"))
            logits_BTUV, units_BTU = self._predict(batch)
            logits.append(logits_BTUV[batch[1]])
            units.append(units_BTU[batch[1]])
        logits_FUV, units_FU = torch.cat(logits), torch.cat(units)
        return {
            "masked_loss": float(_unit_loss(logits_FUV, units_FU)),
            "masked_accuracy": float(_accuracy(logits_FUV, units_FU)),
            "unigram_entropy": unigram_entropy(units_FU, self.config.model.num_units),
        }

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Units so few that predicting them teaches nothing, and predictions no better than their frequencies."""
        alarms = {}
        entropy = figures.get("evaluation/unigram_entropy")
        if entropy is not None and entropy < 0.5 * math.log(self.config.model.num_units):
            alarms["few units"] = (
                f"held-out audio uses {math.exp(entropy):.0f} units: is it all alike, or silent?"
            )
        if entropy is not None and step >= 400 and figures["evaluation/masked_loss"] > entropy:
            alarms["nothing learned"] = "hidden frames are predicted no better than by how often units occur"
        return alarms

    def _draw(self, store: ClipStore, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        config = self.config
        crops_BN = random_crops(store, config.batch_size, config.crop_frames * HOP_SAMPLES, generator).samples
        mask_BT = span_mask(
            config.batch_size, config.crop_frames, config.masked_share, config.masked_span, generator
        )
        return crops_BN.to(self._device), mask_BT.to(self._device)

    def _predict(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        crops_BN, mask_BT = batch
        with torch.no_grad():
            mel_BLM = self.encoder.mel(crops_BN)
            units_BTU = self.encoder.units(mel_BLM)
        return self.encoder.unit_logits(mel_BLM, mask_BT), units_BTU


@torch.no_grad()
def fit_units(encoder: MelUnitEncoder, store: ClipStore, config: TeacherTrainingConfig) -> None:
    """Set the encoder's band statistics and its units, from random crops of the training clips."""
    device = encoder.band_mean_M.device
    mels = []
    for index in range(config.unit_batches):
        dice = step_generator(config.seed, index, "unit crops")
        crops_BN = random_crops(store, config.batch_size, config.crop_frames * HOP_SAMPLES, dice).samples
        mels.append(encoder.mel(crops_BN.to(device)))
    bands_SM = torch.cat(mels).flatten(0, 1)
    encoder.band_mean_M.copy_(bands_SM.mean(dim=0))
    encoder.band_std_M.copy_(bands_SM.std(dim=0).clamp_min(1e-3))
    points_SP = torch.cat([encoder.unit_features(mel_BLM).flatten(0, 2) for mel_BLM in mels])
    encoder.unit_mean_P.copy_(points_SP.mean(dim=0))
    encoder.unit_std_P.copy_(points_SP.std(dim=0).clamp_min(1e-3))
    standard_SP = (points_SP - encoder.unit_mean_P) / encoder.unit_std_P
    dice = step_generator(config.seed, 0, "units")
    encoder.units_VP.copy_(kmeans(standard_SP, config.model.num_units, dice, iterations=20)[0])


def fit_statistics(
    teacher: SemanticTeacher, store: ClipStore, seed: int, batches: int = 20, batch_size: int = 16
) -> None:
    """Measure the statistics of any teacher's features on random crops of the training clips."""
    device = teacher.mean_RC.device
    length = CROP_FRAMES * HOP_SAMPLES
    dice = (step_generator(seed, index, "feature statistics") for index in range(batches))
    crops = (random_crops(store, batch_size, length, generator).samples for generator in dice)
    teacher.fit_statistics(crops_BN.to(device) for crops_BN in crops)


def span_mask(batch: int, frames: int, share: float, span: int, generator: torch.Generator) -> Tensor:
    """A mask of the frames to hide, bool `[B, T]`: spans from random starts, `share` of the frames on average."""
    starts = torch.rand(batch, frames + span - 1, generator=generator) < 1 - (1 - share) ** (1 / span)
    # frame t is hidden if any of the `span` starts up to it is drawn; some start before the crop
    return starts.unfold(1, span, 1).any(dim=2)


def unigram_entropy(units: Tensor, num_units: int) -> float:
    """The entropy of how often each unit occurs, in nats: the least loss of a prediction that ignores its input."""
    shares_V = torch.bincount(units.flatten(), minlength=num_units).double() / units.numel()
    return float(torch.special.entr(shares_V).sum())


def _unit_loss(logits_FUV: Tensor, units_FU: Tensor) -> Tensor:
    return functional.cross_entropy(logits_FUV.float().flatten(0, 1), units_FU.flatten())


def _accuracy(logits_FUV: Tensor, units_FU: Tensor) -> Tensor:
    return (logits_FUV.argmax(dim=2) == units_FU).float().mean()
