"""Losses of the adversarial game, and the alarm for a discriminator that has stopped playing.

`real` and `fake` are what `Discriminators` gives for recordings and for reconstructions: one output a
sub-discriminator, in the same order.

Shapes: S sub-discriminators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.train.loop.loop import Update
from tokenizer.training.discriminators import DiscriminatorConfig, DiscriminatorOutput, Discriminators

Outputs = Sequence[DiscriminatorOutput]


def discriminator_loss(real: Outputs, fake: Outputs) -> Tensor:
    """Hinge loss (EnCodec, arXiv 2210.13438, section 3.4), mean over the sub-discriminators.

    2.0 is the score of one that answers 0 to everything, 0.0 that of one that is right by a margin of 1.
    """
    losses = [
        functional.relu(1 - r.logits.float()).mean() + functional.relu(1 + f.logits.float()).mean()
        for r, f in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).mean()


def generator_loss(fake: Outputs) -> Tensor:
    """The generator's side of the hinge game: minus the mean logit, mean over the sub-discriminators.

    EnCodec writes max(0, 1 - D); its gradient ends once D is above 1, this one's never does.
    """
    return -torch.stack([f.logits.float().mean() for f in fake]).mean()


def feature_matching_loss(real: Outputs, fake: Outputs) -> Tensor:
    """L1 between features over the mean magnitude of the real ones (EnCodec), mean over all layers.

    The real features are the target and get no gradient.
    """
    distances = []
    for r, f in zip(real, fake, strict=True):
        for target, given in zip(r.features, f.features, strict=True):
            target = target.detach().float()
            distances.append((given.float() - target).abs().mean() / target.abs().mean().clamp_min(1e-8))
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
        "real_logit": torch.stack([r.logits.float().mean() for r in real]).mean(),
        "fake_logit": torch.stack([f.logits.float().mean() for f in fake]).mean(),
        "accuracy": torch.stack(right).mean(),
    }


class DeadDiscriminatorWatch(nn.Module):
    """Says which sub-discriminators are dead: they answer the same to recordings and to reconstructions.

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
    def update(self, real: Outputs, fake: Outputs) -> None:
        """Takes in the outputs of one discriminator step."""
        gaps = [
            (r.logits.float().mean() - f.logits.float().mean()).abs() for r, f in zip(real, fake, strict=True)
        ]
        # the first steps weigh in full, as a plain mean
        decay = (self.steps / (self.steps + 1)).clamp_max(self.decay)
        self.gap_S.mul_(decay).add_(torch.stack(gaps) * (1 - decay))
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
    """Discriminators as a training task uses them: two losses for the generator, a step of their own, alarms."""

    def __init__(self, config: DiscriminatorConfig, device: torch.device) -> None:
        self._discriminators = Discriminators(config).to(device)
        self._watch = DeadDiscriminatorWatch(self._discriminators.names).to(device)

    def modules(self) -> dict[str, nn.Module]:
        """For the task's own `modules`; the optimizer `discriminator` is to have `discriminators`."""
        return {"discriminators": self._discriminators, "watch": self._watch}

    def losses(self, made_BCN: Tensor, real_BCN: Tensor) -> dict[str, Tensor]:
        """`adversarial` and `feature`, of what the generator made; the discriminators get no gradient."""
        with frozen(self._discriminators):
            made = self._discriminators(made_BCN)
            with torch.no_grad():
                real = self._discriminators(real_BCN)
            return {"adversarial": generator_loss(made), "feature": feature_matching_loss(real, made)}

    def update(self, made_BCN: Tensor, real_BCN: Tensor) -> Update:
        """The discriminators' own step; the generator gets no gradient."""
        real, made = self._discriminators(real_BCN), self._discriminators(made_BCN.detach())
        loss = discriminator_loss(real, made)
        self._watch.update(real, made)
        figures = {"discriminator": loss.detach(), **discriminator_health(real, made)}
        return Update(loss, figures, "discriminator")

    def alarms(self) -> dict[str, str]:
        """Discriminators that no longer tell real from made."""
        return {
            f"dead discriminator {name}": f"{name} answers the same to real and made audio and teaches nothing: "
            "raise its learning rate, or let the adversary begin later"
            for name in self._watch.dead()
        }
