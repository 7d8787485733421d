"""The objective of flow matching: the straight path from noise to data, times, dropout of conditions, the loss.

t is 0 at noise and 1 at data: x_t = (1 - t) noise + t data, and the velocity is data - noise (arXiv 2210.02747,
2209.03003).

Shapes: B samples, L latents of all samples, D latent dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from audiollm.flow.model.packed import Conditions, Modality
from audiollm.flow.model.rows import SampleRows

TimeDensityName = Literal["logit_normal", "uniform", "shifted"]


@dataclass(frozen=True)
class TimeDensity:
    """The density from which the times of a training step are drawn."""

    name: TimeDensityName = "logit_normal"
    """`logit_normal`: sigmoid(N(mean, deviation)) (arXiv 2403.03206); `uniform`; `shifted`: uniform, moved towards
    noise for samples that are longer than `base_latents`."""
    mean: float = -1.5
    """With 0, 1 time in 70 is below 0.1, and there it is decided what is heard and when: latents are redundant, so
    that a tenth of the data beside nine of noise tells a model that sees all of them nearly everything."""
    deviation: float = 1.2
    base_latents: int = 194

    def draw(self, lengths: Sequence[int], generator: torch.Generator) -> Tensor:
        """A time for each sample, float32 `[B]`.

        Args:
            lengths: latents of each sample; only `shifted` depends on them.
        """
        if self.name == "logit_normal":
            return (torch.randn(len(lengths), generator=generator) * self.deviation + self.mean).sigmoid()
        uniform_B = torch.rand(len(lengths), generator=generator)
        if self.name == "uniform":
            return uniform_B
        return shift_times(uniform_B, torch.tensor(lengths), self.base_latents)


@dataclass(frozen=True)
class ConditionDropout:
    """How often conditions are hidden in training, for guidance."""

    per_modality: float = 0.2
    """Probability of each modality, by itself."""
    video: float = 0.2
    """Probability that frames and synchronisation are hidden together, as where there is no video."""
    words: float = 0.2
    """Probability that caption and CoT are hidden together, as where nothing is said."""
    together: float = 0.1
    """Probability that all are hidden: four modalities hidden at 0.2 each are all hidden in 0.16 % of the samples."""

    def draw(self, present: Collection[Modality], generator: torch.Generator) -> set[Modality]:
        """The hidden ones among the modalities that a sample has. Always draws the same number of random values."""
        together, *modality_draws, video, words = torch.rand(3 + len(_ORDER), generator=generator).tolist()
        if together < self.together:
            return set(present)
        hidden = {
            name for name, value in zip(_ORDER, modality_draws, strict=True) if value < self.per_modality
        }
        if video < self.video:
            hidden |= _PICTURES
        if words < self.words:
            hidden |= _WORDS
        return hidden & set(present)

    def probability(self, hidden: Collection[Modality], present: Collection[Modality]) -> float:
        """The probability that exactly `hidden` are hidden of a sample that has `present`."""

        def within(group: frozenset[Modality], share: float) -> float:
            there, gone = group & set(present), group & set(hidden)
            by_itself = self.per_modality ** len(gone) * (1 - self.per_modality) ** (len(there) - len(gone))
            return (1 - share) * by_itself + (share if gone == there else 0.0)

        apart_probability = within(_PICTURES, self.video) * within(_WORDS, self.words)
        return (1 - self.together) * apart_probability + (
            self.together if len(hidden) == len(present) else 0.0
        )


_PICTURES: frozenset[Modality] = frozenset({"frames", "sync"})
_WORDS: frozenset[Modality] = frozenset({"caption", "cot"})
_ORDER: tuple[Modality, ...] = ("frames", "sync", "caption", "cot")


def shift_times(t_B: Tensor, lengths_B: Tensor, base_latents: int) -> Tensor:
    """Move times towards noise for long samples, as the signal-to-noise ratio of longer data asks (arXiv 2403.03206).

    With s = 1 - t the noise level and a = sqrt(length / base), s becomes a s / (1 + (a - 1) s).
    """
    factor_B = (lengths_B.to(t_B) / base_latents).sqrt()
    noise_B = 1 - t_B
    return 1 - factor_B * noise_B / (1 + (factor_B - 1) * noise_B)


def on_path(noise_LD: Tensor, data_LD: Tensor, t_L1: Tensor) -> Tensor:
    """x_t = (1 - t) noise + t data."""
    return torch.lerp(noise_LD, data_LD, t_L1)


def velocity_target(noise_LD: Tensor, data_LD: Tensor) -> Tensor:
    """The velocity of the path, data - noise, the same at every time."""
    return data_LD - noise_LD


def velocity_loss(velocity_LD: Tensor, target_LD: Tensor, wanted_L: Tensor, total: float) -> Tensor:
    """Squared error summed over latents and averaged over channels, divided by `total`.

    Args:
        wanted_L: bool, the latents that count: kept ones do not.
        total: number of latents that count in the optimizer step, on all ranks; the parts of a step then add up to
            the mean over its latents, however it is packed.
    """
    error_L = (
        (velocity_LD.to(torch.promote_types(velocity_LD.dtype, torch.float32)) - target_LD)
        .square()
        .mean(dim=1)
    )
    return (error_L * wanted_L).sum() / max(total, 1.0)


def losses_by_sample(velocity_LD: Tensor, target_LD: Tensor, wanted_L: Tensor, latents: SampleRows) -> Tensor:
    """The mean squared error of each sample over the latents that count, `[B]`; 0 for a sample without any."""
    error_L = (velocity_LD.float() - target_LD).square().mean(dim=1)
    counts_B = latents.sums(wanted_L.to(error_L)[:, None])[:, 0]
    return latents.sums((error_L * wanted_L)[:, None])[:, 0] / counts_B.clamp_min(1)


def hide(conditions: Conditions, hidden: Collection[Modality]) -> Conditions:
    """The conditions without the hidden modalities: a hidden modality is an absent one."""
    remaining: Mapping[Modality, object] = {
        name: features for name, features in conditions.items() if name not in hidden
    }
    return remaining  # type: ignore[return-value]
