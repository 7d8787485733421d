"""Training the continuous variant: reconstruction in left, right, mid and side, divergence, then the adversary.

Shapes: B crops, C channels, V views (left, right, mid, side), N samples, T frames, D latent dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.loop import Figures, Update, step_generator
from tokenizer.clips import pitch_target
from tokenizer.continuous.data import StereoStore, stereo_crops
from tokenizer.continuous.model import AudioVAE, stereo_views
from tokenizer.native.phase_band import LappedTransform
from tokenizer.quantizers.codebooks import all_rows
from tokenizer.training.adversary import Adversary
from tokenizer.training.balancer import GradientBalancer, steps_measured
from tokenizer.training.discriminators import TINY, DiscriminatorConfig
from tokenizer.training.losses import WINDOWS, BatchShare, ReconstructionLoss
from tokenizer.training.task import OUTPUT_WEIGHTS, CropBatch

ACTIVE_VARIANCE = 0.01
"""A channel whose mean varies by more is in use (Burda et al., arXiv 1509.00519, section 5.2)."""


@dataclass(frozen=True)
class VAETaskConfig:
    """Batch, phases and loss weights of a training."""

    seed: int
    batch_size: int
    crop_frames: int
    kl_weight: float = 1e-4
    """Weight of the divergence (nats per frame) beside an STFT distance of weight 1; Stable Audio Open's."""
    pitch_weight: float = 0.0
    """Weight of the loss on pitch and voicing; above 0 for a model with a harmonic source."""
    adversary_share: float = 0.3
    """Share of the steps before the discriminators begin; 1 for none."""
    output_weights: Mapping[str, float] = field(default_factory=lambda: {**OUTPUT_WEIGHTS, "phase": 1.0})
    """Shares of the gradient on the waveform, as the discrete tokenizer's; `stft` is required. `phase` is the L1
    distance of the phase band's waveform, coefficient by coefficient."""
    discriminators: DiscriminatorConfig = TINY


class VAETask:
    """A `Task` of the training loop: the VAE, its discriminators, and the balancer between its losses."""

    def __init__(
        self,
        model: AudioVAE,
        train: StereoStore,
        test: StereoStore,
        config: VAETaskConfig,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.config = model, config
        self._wrapped: nn.Module = model
        self._share = BatchShare(config.batch_size, ranks)
        self._share.check()
        self._train, self._test = train, test
        self._device = next(model.parameters()).device
        self._loss = ReconstructionLoss(model.sample_rate).to(self._device)
        self._band: LappedTransform | None = None
        if model.config.phase_band_hz:
            band = LappedTransform(model.sample_rate, model.hop_samples, model.config.phase_band_hz)
            self._band = band.to(self._device)
        self._balancer = GradientBalancer(config.output_weights).to(self._device)
        game = replace(config.discriminators, audio_channels=model.channels)
        self._adversary = Adversary(game, self._device, self._share)

    def modules(self) -> dict[str, nn.Module]:
        return {
            "vae": self.model,
            "balancer": self._balancer,
            **self._adversary.modules(),
        }

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["vae"], "discriminator": ["discriminators"]}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._wrapped = modules["vae"]
        self._adversary.adopt(modules)

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> CropBatch:
        """This rank's rows `[B, C, N]`. Every rank draws the global batch: where one part ends decides the next."""
        config, dice = self.config, step_generator(self.config.seed, step, "batch")
        length = config.crop_frames * self.model.hop_samples
        crops, rows = stereo_crops(self._train, config.batch_size, length, dice), self._share.rows
        samples_BCN = crops.samples[rows].to(self._device)
        if not config.pitch_weight:
            return CropBatch(samples_BCN, None)
        pitch = pitch_target(self._train, crops, self.model.config.mel_hop_samples, rows)
        return CropBatch(samples_BCN, pitch.to(self._device))

    def updates(self, batch: CropBatch, step: int, steps: int) -> Iterator[Update]:
        batch_BCN = batch.samples
        adversary_begin = math.ceil(self.config.adversary_share * steps)
        adversary = step >= adversary_begin
        dice = step_generator(self.config.seed, step, "vae")
        shape_BTD = (self.config.batch_size, self.config.crop_frames, self.model.latent_dim)
        noise_BTD = torch.randn(shape_BTD, generator=dice)[self._share.rows]
        made_BCN, posterior, pitch_loss = self._wrapped(batch_BCN, noise_BTD.to(self._device), batch.pitch)
        losses = self._output_losses(made_BCN, batch_BCN, dice)
        if adversary:
            losses |= self._adversary.losses(made_BCN, batch_BCN)
        measured = steps_measured(step, adversary_begin if adversary else 0)
        loss = self._balancer.balance(losses, made_BCN, measured)
        kl = self._share.scale_mean(posterior.divergence().sum(dim=2).mean())
        loss = loss + self._kl_factor(losses) * kl
        figures: Figures = {key: self._share.figure(value) for key, value in losses.items()}
        figures["kl"] = self._share.figure(kl)
        if pitch_loss is not None:
            of_pitch = self._share.scale_mean(pitch_loss)
            loss = loss + self.config.pitch_weight * of_pitch
            figures["pitch"] = self._share.figure(of_pitch)
        figures["channels_active"] = _share_active(all_rows(posterior.mean.detach().flatten(0, 1)))
        yield Update(loss, figures)
        if adversary:
            yield self._adversary.update(made_BCN, batch_BCN)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Distances on held-out clips (by channel, mid and side) and the divergence; on the first rank alone."""
        if not self._share.ranks.first:
            return {}
        return evaluate_vae(self.model, self._test, self._loss)

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        """A collapsed posterior, and a discriminator that no longer tells real from made."""
        alarms: dict[str, str] = {}
        if figures.get("channels_active", 1.0) < 0.1:
            alarms["posterior collapse"] = (
                f"{figures['channels_active']:.0%} of the latent's channels are in use: lower `kl_weight`, "
                "or give more varied audio"
            )
        return {**alarms, **self._adversary.alarms()}

    def _output_losses(self, made_BCN: Tensor, real_BCN: Tensor, dice: torch.Generator) -> dict[str, Tensor]:
        """Spectral distances are means over left, right, mid and side; two of the four scales a step."""
        scales = [WINDOWS[i] for i in torch.randperm(len(WINDOWS), generator=dice)[:2].tolist()]
        losses: dict[str, Tensor] = self._loss(_flatten_views(made_BCN), _flatten_views(real_BCN), scales)
        losses["waveform"] = functional.l1_loss(made_BCN, real_BCN)
        if self._band is not None:
            losses["phase"] = functional.l1_loss(self._band(made_BCN), self._band(real_BCN))
        weights = self.config.output_weights
        return {name: self._share.scale_mean(loss) for name, loss in losses.items() if name in weights}

    def _kl_factor(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The balancer divides the STFT distance by the norm of its gradient and gives it a share: so here."""
        weights = self.config.output_weights
        share = weights["stft"] / sum(weights[name] for name in losses)
        norm = self._balancer.average_norms()["stft"]
        return self.config.kl_weight * share / norm.clamp_min(self._balancer.epsilon)


@torch.no_grad()
def evaluate_vae(
    model: AudioVAE, clips: StereoStore, loss: ReconstructionLoss, max_clips: int = 40
) -> dict[str, float]:
    """Means over at most `max_clips` clips, evenly picked, decoded from the latents' means.

    Distances are natural-log L1: `mel`, `stft` of left and right, `mel_mid_side`, `stft_mid_side` of mid and side.
    `kl` is in nats a frame; `channels_active` is the share of the latent's channels whose means vary. `snr_db` compares
    waveforms sample by sample: below 0 dB silence would be nearer to the recording.
    """
    rows: list[dict[str, float]] = []
    means = []
    for _, samples_CN in clips.picked(max_clips):
        samples_CN = samples_CN.to(model.latent_mean_D.device)
        posterior = model.encode_distribution(samples_CN)
        decoded_CN = model.decode(posterior.mean, num_samples=samples_CN.shape[1])
        real_VN, made_VN = stereo_views(samples_CN), stereo_views(decoded_CN)
        row = loss(made_VN[:2], real_VN[:2])
        if model.channels == 2:
            mid_side = loss(made_VN[2:], real_VN[2:])
            row |= {f"{name}_mid_side": value for name, value in mid_side.items()}
        row["snr_db"] = waveform_snr_db(samples_CN, decoded_CN)
        row["kl"] = posterior.divergence().sum(dim=0).mean()
        rows.append({name: float(value) for name, value in row.items()})
        means.append(posterior.mean.T)
    figures = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {**figures, "channels_active": float(_share_active(torch.cat(means)))}


def _flatten_views(samples_BCN: Tensor) -> Tensor:
    """`[B, 2, N]` to `[B * 4, N]`; mono `[B, 1, N]` to `[B, N]`."""
    return stereo_views(samples_BCN).flatten(0, 1)


def _share_active(mean_TD: Tensor) -> Tensor:
    return (mean_TD.var(dim=0, correction=0) > ACTIVE_VARIANCE).float().mean()


def waveform_snr_db(real_CN: Tensor, made_CN: Tensor) -> Tensor:
    """The recording's energy over that of its difference from what was decoded, in dB; -80 to 80."""
    ratio = real_CN.square().sum() / (real_CN - made_CN).square().sum().clamp_min(1e-20)
    return (10 * torch.log10(ratio.clamp_min(1e-8))).clamp_max(80)
