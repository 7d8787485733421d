"""Training a tokenizer: plain autoencoder, then k-means codebooks, then the adversary joins.

Shapes: B crops, N samples, T frames, H teacher's feature dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.loop import Figures, Update, step_generator
from tokenizer.clips import ClipStore, Crops, pitch_target, random_crops
from tokenizer.native.model import AudioTokenizer, TokenizerOutput
from tokenizer.native.pitch import PitchTarget
from tokenizer.quantizers.codebooks import at_least_float32
from tokenizer.quantizers.residual import Quantizer, perplexity
from tokenizer.training.adversary import Adversary
from tokenizer.training.balancer import GradientBalancer, steps_measured
from tokenizer.training.discriminators import TINY, DiscriminatorConfig
from tokenizer.training.linear_path import FRAMES_FITTED, fit_linear_path
from tokenizer.training.losses import WINDOWS, BatchShare, ReconstructionLoss

if TYPE_CHECKING:
    from tokenizer.teacher.model import SemanticTeacher

OUTPUT_WEIGHTS = {"mel": 1.0, "stft": 1.0, "waveform": 0.1, "adversarial": 0.25, "feature": 0.5}
"""Share of each loss in the gradient on the waveform; the balancer keeps them whatever the losses' scales."""


REFIT_FRAMES_PER_CODE = 60
CLIPS_PER_EVALUATION = 40
"""Held-out clips whose distances an evaluation during training measures."""
CLIPS_OF_PERPLEXITY = 100
"""Held-out clips whose codes are counted, at every evaluation: over fewer frames a perplexity is lower."""
COLLAPSED_SHARE = 0.05
"""An alarm rises when a codebook's perplexity or its codes in use fall below this share of its size."""
SETTLING_STEPS = 150
"""No such alarm rises earlier after k-means: its clusters of the last residuals differ much in size, and even out."""


@dataclass(frozen=True)
class TokenizerTaskConfig:
    """Batch, phases and loss weights of a training; `tokenizer/training/README.md` explains the weights."""

    seed: int
    batch_size: int
    crop_frames: int
    autoencoder_share: float = 0.06
    """Share of the steps before the codebooks begin."""
    trained_codebooks: bool = False
    """The codebooks come with the model: no k-means start, and no steps without them."""
    adversary_share: float = 0.3
    """Share of the steps before the discriminators begin; 1 for none."""
    output_weights: Mapping[str, float] = field(default_factory=lambda: dict(OUTPUT_WEIGHTS))
    commitment_weight: float = 1.0
    semantic_weight: float = 1.0
    pitch_weight: float = 0.0
    """Weight of the loss on pitch and voicing; above 0 for a model with a harmonic source."""
    quantizer_dropout: float = 0.3
    """Share of the crops that use only the first 1 to K codebooks, so that every prefix decodes."""
    revive_every: int = 10
    revive_until: float = 0.8
    """No code is moved after this share of the steps."""
    kmeans_batches: int = 24
    discriminators: DiscriminatorConfig = TINY


class CropBatch(NamedTuple):
    """Crops `[B, N]` or `[B, C, N]`, and their pitch at the mel rate; None for a model without a harmonic source."""

    samples: Tensor
    pitch: PitchTarget | None


class TrainableTokenizer(Protocol):
    """The interface of a tokenizer that can be trained."""

    quantizer: Quantizer

    @property
    def hop_samples(self) -> int: ...
    @property
    def sample_rate(self) -> int: ...
    @property
    def num_codebooks(self) -> int: ...
    @property
    def codebook_size(self) -> int: ...

    def __call__(
        self,
        samples_BN: Tensor,
        num_codebooks: int | Tensor | None = None,
        quantize: bool = True,
        features_BTH: Tensor | None = None,
        pitch: PitchTarget | None = None,
    ) -> TokenizerOutput: ...
    def latent(self, samples_BN: Tensor) -> Tensor: ...
    def encode(self, samples_CN: Tensor) -> Tensor: ...
    def decode(self, codes_KT: Tensor) -> Tensor: ...


class TokenizerTask:
    """A `Task` of the training loop: the tokenizer, its discriminators, and the balancer between its losses."""

    def __init__(
        self,
        model: TrainableTokenizer,
        train: ClipStore,
        test: ClipStore,
        config: TokenizerTaskConfig,
        teacher: SemanticTeacher | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        assert isinstance(model, nn.Module)
        self.model, self.config, self._teacher = model, config, teacher
        self._module: nn.Module = model
        self._wrapped: nn.Module = model
        self._share = BatchShare(config.batch_size, ranks)
        self._share.check()
        self._train, self._test = train, test
        self._device = next(model.parameters()).device
        self._loss = ReconstructionLoss(model.sample_rate).to(self._device)
        self._balancer = GradientBalancer(config.output_weights).to(self._device)
        self._adversary = Adversary(config.discriminators, self._device, self._share)
        self._codebooks_settled_at = 0

    def modules(self) -> dict[str, nn.Module]:
        return {
            "tokenizer": self._module,
            "balancer": self._balancer,
            **self._adversary.modules(),
        }

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["tokenizer"], "discriminator": ["discriminators"]}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._wrapped = modules["tokenizer"]
        self._adversary.adopt(modules)

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> CropBatch:
        """This rank's rows. Every rank draws the global batch: where one crop ends decides the next."""
        crops = self.crops(step_generator(self.config.seed, step, "batch"))
        rows = self._share.rows
        samples_BN = crops.samples[rows].to(self._device)
        if not self.config.pitch_weight:
            return CropBatch(samples_BN, None)
        assert isinstance(self.model, AudioTokenizer)
        pitch = pitch_target(self._train, crops, self.model.config.mel_hop_samples, rows)
        return CropBatch(samples_BN, pitch.to(self._device))

    def updates(self, batch: CropBatch, step: int, steps: int) -> Iterator[Update]:
        batch_BN = batch.samples
        begin = -1 if self.config.trained_codebooks else round(self.config.autoencoder_share * steps)
        self._codebooks_settled_at = begin + SETTLING_STEPS
        adversary_begin = math.ceil(self.config.adversary_share * steps)
        adversary = step >= adversary_begin
        dice = step_generator(self.config.seed, step, "quantizer")
        if step == begin:
            self._initialize_codebooks(dice)
        features_BTH = self._teacher.features(batch_BN) if self._teacher is not None else None
        codebooks_B = self._codebooks_of_crops(dice)
        out = self._wrapped(batch_BN, codebooks_B, step >= begin, features_BTH, batch.pitch)
        losses = self._output_losses(out.samples_BN, batch_BN, dice)
        if adversary:
            losses |= self._adversary.losses(out.samples_BN[:, None], batch_BN[:, None])
        measured = steps_measured(step, adversary_begin if adversary else 0)
        loss = self._balancer.balance(losses, out.samples_BN, measured)
        loss = loss + self.config.commitment_weight * out.commitment
        figures: Figures = {key: self._share.figure(value) for key, value in losses.items()}
        figures["commitment"] = self._share.figure(out.commitment)
        if out.semantic is not None:
            semantic = self._share.scale_mean(out.semantic)
            loss = loss + self.config.semantic_weight * semantic
            figures["semantic"] = self._share.figure(semantic)
        if out.pitch is not None:
            of_pitch = self._share.scale_mean(out.pitch)
            loss = loss + self.config.pitch_weight * of_pitch
            figures["pitch"] = self._share.figure(of_pitch)
        if step > begin:
            figures |= self._replace_dead_codes(out.latent_BTD.detach(), step, steps, dice)
        yield Update(loss, figures)
        if adversary:
            yield self._adversary.update(out.samples_BN[:, None], batch_BN[:, None])

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Mel and STFT distance on held-out clips, and the codebooks' perplexity there; on the first rank alone."""
        if not self._share.ranks.first:
            return {}
        return evaluate_tokenizer(self.model, self._test, self._loss, CLIPS_PER_EVALUATION)

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """Collapsed codebooks and a discriminator that no longer tells real from made."""
        alarms: dict[str, str] = {}
        perplexities = [value for key, value in figures.items() if key.startswith("perplexity/")]
        lowest, size = min(perplexities, default=float("inf")), self.model.codebook_size
        collapsed = lowest < COLLAPSED_SHARE * size or figures.get("codes_alive", 1.0) < COLLAPSED_SHARE
        if collapsed and step >= self._codebooks_settled_at:
            alarms["codebook collapse"] = (
                f"a codebook is used as if it had {lowest:.0f} of its {size} codes: lower the learning rate or the "
                "commitment weight, train longer before the codebooks begin, or give more varied audio"
            )
        return {**alarms, **self._adversary.alarms()}

    def _output_losses(self, made_BN: Tensor, real_BN: Tensor, dice: torch.Generator) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self._loss(made_BN, real_BN, self._scales_of_step(dice))
        losses["waveform"] = functional.l1_loss(made_BN, real_BN)
        return {name: self._share.scale_mean(loss) for name, loss in losses.items()}

    def _replace_dead_codes(
        self, latent_BTD: Tensor, step: int, steps: int, dice: torch.Generator
    ) -> Figures:
        quantizer = self.model.quantizer
        due = step % self.config.revive_every == 0 and step < self.config.revive_until * steps
        figures: Figures = {}
        if due:
            figures["revived"] = float(quantizer.revive(latent_BTD, dice))
        figures["codes_alive"] = quantizer.alive_K().min()
        for level, value in enumerate(quantizer.ema_perplexity_K()):
            figures[f"perplexity/{level}"] = value
        return figures

    def _codebooks_of_crops(self, dice: torch.Generator) -> Tensor:
        """Number of codebooks that each crop of this rank uses, `[B]`."""
        total, size = self.model.num_codebooks, self.config.batch_size
        dropped_B = torch.rand(size, generator=dice) < self.config.quantizer_dropout
        some_B = torch.randint(1, total + 1, (size,), generator=dice)
        return torch.where(dropped_B, some_B, total)[self._share.rows].to(self._device)

    def _scales_of_step(self, dice: torch.Generator) -> list[int]:
        """Two of the four scales: the same loss on average, at half its cost."""
        return [WINDOWS[i] for i in torch.randperm(len(WINDOWS), generator=dice)[:2].tolist()]

    def _initialize_codebooks(self, dice: torch.Generator) -> None:
        self.model.quantizer.initialize(self._latents(self.config.kmeans_batches, "kmeans"), dice)

    def fit_linear_path(self) -> dict[str, float]:
        """Before the first step: set the maps of a model with `linear_path` in closed form; the fit's figures."""
        assert isinstance(self.model, AudioTokenizer)
        own_batches = self._share.own_batches(self._batches_of(FRAMES_FITTED))
        return fit_linear_path(self.model, self._crops_of_batches(own_batches, "linear path"))

    def refit_codebooks(self) -> None:
        """After the last step: fit the codebooks to the averaged encoder (they have followed the other one)."""
        batches = self._batches_of(REFIT_FRAMES_PER_CODE * self.model.codebook_size)
        dice = step_generator(self.config.seed, 0, "refit")
        self.model.quantizer.refit(self._latents(batches, "refit crops"), dice)

    def _batches_of(self, frames: int) -> int:
        """The batches that have so many frames."""
        return -(-frames // (self.config.batch_size * self.config.crop_frames))

    @torch.no_grad()
    def _latents(self, batches: int, purpose: str) -> Tensor:
        """Latents of random training crops, `[S, D]`: those of the batches that this rank draws, `[0, D]` for none."""
        own_batches = self._share.own_batches(batches)
        latents = [
            at_least_float32(self.model.latent(crops_BN)).flatten(0, 1)
            for crops_BN in self._crops_of_batches(own_batches or range(1), purpose)
        ]
        return torch.cat(latents) if own_batches else latents[0][:0]

    def _crops_of_batches(self, batches: range, purpose: str) -> Iterator[Tensor]:
        """Global batches of random training crops, by their numbers, `[B, N]` each."""
        for index in batches:
            crops = self.crops(step_generator(self.config.seed, index, purpose))
            yield crops.samples.to(self._device)

    def crops(self, generator: torch.Generator) -> Crops:
        """The crops of a global batch."""
        length = self.config.crop_frames * self.model.hop_samples
        return random_crops(self._train, self.config.batch_size, length, generator)


@torch.no_grad()
def evaluate_tokenizer(
    model: TrainableTokenizer,
    clips: ClipStore,
    loss: ReconstructionLoss,
    max_clips: int = CLIPS_OF_PERPLEXITY,
) -> dict[str, float]:
    """Distances (natural-log L1) and perplexity over the first ten seconds of held-out clips, evenly picked.

    Args:
        max_clips: clips for the distances, which cost more; the perplexity is always over `CLIPS_OF_PERPLEXITY`.
    """
    distances: dict[str, list[float]] = {"mel": [], "stft": []}
    codes = []
    device = next(loss.buffers()).device
    stride = -(-min(len(clips), CLIPS_OF_PERPLEXITY) // max_clips)
    for number, (_, samples_N) in enumerate(clips.picked(CLIPS_OF_PERPLEXITY)):
        samples_1N = samples_N[None, : 10 * model.sample_rate].to(device)
        codes.append(model.encode(samples_1N))
        if number % stride:
            continue
        decoded_1N = model.decode(codes[-1])[:, : samples_1N.shape[1]]
        for key, value in loss(decoded_1N, samples_1N).items():
            distances[key].append(float(value))
    use = perplexity(torch.cat(codes, dim=1), model.codebook_size)
    figures: dict[str, Any] = {key: sum(values) / len(values) for key, values in distances.items()}
    return {**figures, "perplexity_first": float(use[0]), "perplexity_mean": float(use.mean())}
