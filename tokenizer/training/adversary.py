"""Losses of adversarial training, and an alarm for a discriminator that no longer learns.

`real` and `fake` are what `Discriminators` gives for recordings and for reconstructions: one output a
sub-discriminator, in the same order.

Shapes: S sub-discriminators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.train.loop.loop import Update
from tokenizer.quantizers.codebooks import at_least_float32
from tokenizer.training.discriminators import DiscriminatorConfig, DiscriminatorOutput, Discriminators
from tokenizer.training.losses import BatchShare

Outputs = Sequence[DiscriminatorOutput]


def discriminator_loss(real: Outputs, fake: Outputs) -> Tensor:
    """Hinge loss (EnCodec, arXiv 2210.13438, section 3.4), mean over the sub-discriminators.

    2.0 is the score of one that answers 0 to everything, 0.0 that of one that is right by a margin of 1.
    """
    losses = [
        functional.relu(1 - at_least_float32(r.logits)).mean()
        + functional.relu(1 + at_least_float32(f.logits)).mean()
        for r, f in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).mean()


def generator_loss(fake: Outputs) -> Tensor:
    """The generator's side of the hinge game: minus the mean logit, mean over the sub-discriminators.

    EnCodec writes max(0, 1 - D); its gradient ends once D is above 1, this one's never does.
    """
    return -torch.stack([at_least_float32(f.logits).mean() for f in fake]).mean()


def feature_matching_loss(real: Outputs, fake: Outputs, share: BatchShare | None = None) -> Tensor:
    """L1 between features over the mean magnitude of the real ones (EnCodec), mean over all layers.

    The real features are the target and get no gradient. With a `share` of several ranks, the magnitudes are those of
    the global batch (all ranks call it), and the distances are of this rank's rows.
    """
    pairs = [
        (at_least_float32(target.detach()), at_least_float32(generated))
        for r, f in zip(real, fake, strict=True)
        for target, generated in zip(r.features, f.features, strict=True)
    ]
    magnitudes = torch.stack([target.abs().mean() for target, _ in pairs])
    if share is not None:
        magnitudes = share.global_mean(magnitudes)
    distances = [
        (generated - target).abs().mean() / magnitude.clamp_min(1e-8)
        for (target, generated), magnitude in zip(pairs, magnitudes, strict=True)
    ]
    return torch.stack(distances).mean()


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """No parameter of the module gets a gradient from what is computed inside; gradients still pass through it.

    For the discriminator in the generator's step: left trainable, it gathers the generator's gradients, and
    its next step follows them.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@torch.no_grad()
def discriminator_health(real: Outputs, fake: Outputs) -> dict[str, Tensor]:
    """Figures for the log, mean over the sub-discriminators, on the device (nothing waits for them).

    `real_logit`, `fake_logit`: mean logits. `accuracy`: share of right answers (real above 0, fake below),
    0.5 for one that guesses.
    """
    right = [
        ((r.logits > 0).float().mean() + (f.logits < 0).float().mean()) / 2
        for r, f in zip(real, fake, strict=True)
    ]
    return {
        "real_logit": torch.stack([at_least_float32(r.logits).mean() for r in real]).mean(),
        "fake_logit": torch.stack([at_least_float32(f.logits).mean() for f in fake]).mean(),
        "accuracy": torch.stack(right).mean(),
    }


class DeadDiscriminatorWatch(nn.Module):
    """Detects dead sub-discriminators: they answer the same to recordings and to reconstructions.

    Followed is the gap |mean real logit - mean fake logit| of each step, as a moving average over about
    `patience` / 3 steps. Dead means: `patience` steps or more were seen and the average is at most
    `tolerance`. That covers the symptoms by which it is known elsewhere: by convexity the hinge loss is at
    least 2 - gap, so it stands at 2.0 or above; and where the features are equal (feature matching at 0), the
    logits and so the gap are too. A discriminator at its balance with a good generator is also near a loss
    of 2, but its gap still moves from batch to batch. A gap that is not finite counts as dead.

    The averages are buffers, so a resumed run goes on counting.
    """

    def __init__(self, names: Sequence[str], patience: int = 300, tolerance: float = 0.01) -> None:
        """`names`: one a sub-discriminator, for the alarm (`Discriminators.names`)."""
        super().__init__()
        self.names, self.patience, self.tolerance = list(names), patience, tolerance
        self.decay = 1 - 3 / max(patience, 4)
        self.register_buffer("gap_S", torch.zeros(len(self.names)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.gap_S: Tensor
        self.steps: Tensor

    @torch.no_grad()
    def update(self, real: Outputs, fake: Outputs, share: BatchShare | None = None) -> None:
        """Takes in the outputs of one discriminator step; with a `share`, of this rank's rows (all call it)."""
        gaps_S = torch.stack(
            [
                at_least_float32(r.logits).mean() - at_least_float32(f.logits).mean()
                for r, f in zip(real, fake, strict=True)
            ]
        )
        gaps_S = (gaps_S if share is None else share.global_mean(gaps_S)).abs()
        # the first steps weigh in full, as a plain mean
        decay = (self.steps / (self.steps + 1)).clamp_max(self.decay)
        self.gap_S.mul_(decay).add_(gaps_S * (1 - decay))
        self.steps += 1

    def dead(self) -> list[str]:
        """Names of the dead ones; waits for the device, so ask when the log is written."""
        if int(self.steps) < self.patience:
            return []
        return [
            name
            for name, gap in zip(self.names, self.gap_S.tolist(), strict=True)
            if not gap > self.tolerance
        ]


class Adversary:
    """Discriminators as a training task uses them: two losses for the generator, a step of their own, alarms.

    Losses are this rank's parts of the means over the global batch.
    """

    def __init__(self, config: DiscriminatorConfig, device: torch.device, share: BatchShare) -> None:
        self._share = share
        self._discriminators = Discriminators(config).to(device)
        self._wrapped: nn.Module = self._discriminators
        self._watch = DeadDiscriminatorWatch(self._discriminators.names).to(device)

    def modules(self) -> dict[str, nn.Module]:
        """For the task's own `modules`; the optimizer `discriminator` is to have `discriminators`."""
        return {"discriminators": self._discriminators, "watch": self._watch}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        """Take the discriminators as the strategy wrapped them: their own step goes through these."""
        self._wrapped = modules["discriminators"]

    def losses(self, made_BCN: Tensor, real_BCN: Tensor) -> dict[str, Tensor]:
        """`adversarial` and `feature`, of what the generator made; the discriminators get no gradient."""
        with frozen(self._discriminators):
            fake = self._discriminators(made_BCN)
            with torch.no_grad():
                real = self._discriminators(real_BCN)
            losses = {
                "adversarial": generator_loss(fake),
                "feature": feature_matching_loss(real, fake, self._share),
            }
        return {name: self._share.scale_mean(loss) for name, loss in losses.items()}

    def update(self, made_BCN: Tensor, real_BCN: Tensor) -> Update:
        """The discriminators' own step; the generator gets no gradient."""
        real, fake = self._wrapped(real_BCN), self._wrapped(made_BCN.detach())
        loss = discriminator_loss(real, fake)
        self._watch.update(real, fake, self._share)
        figures = {"discriminator": loss.detach(), **discriminator_health(real, fake)}
        parts = {name: self._share.scale_mean(value) for name, value in figures.items()}
        figures = {name: self._share.figure(scaled_mean) for name, scaled_mean in parts.items()}
        return Update(self._share.scale_mean(loss), figures, "discriminator")

    def alarms(self) -> dict[str, str]:
        """Discriminators that no longer tell real from made."""
        return {
            f"dead discriminator {name}": f"{name} answers the same to real and made audio and teaches nothing: "
            "raise its learning rate, or let the adversary begin later"
            for name in self._watch.dead()
        }
