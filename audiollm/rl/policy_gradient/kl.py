"""KL(policy || reference) from sampled tokens: estimates, in the reward or in the loss, and controllers of its weight.

With d = log policy - log reference at a token that the policy sampled: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
k1 and k3 have the KL as their mean; k2 is biased and has less variance. As a term of the loss, only two choices have
the KL's gradient as their mean: k2, and any ratio-corrected one of k1 and k3 (the README has the table).

Source: http://joschu.net/blog/kl-approx.html; gradients: arXiv 2512.02556 (ratio-corrected), verl (`k3+`).
Shapes: T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.recipe.plug_ins import import_of_class, is_import_path
from audiollm.rl.objectives.terms import MAX_EXPONENT
from audiollm.rl.policy_gradient import settings as s
from audiollm.rl.policy_gradient.catalog import OWN_CONTROLLER_REMEDY, OwnKLController, kl_controller_settings
from audiollm.rl.policy_gradient.settings import Estimator, KLSettings


def kl_estimates(policy_T: Tensor, reference_T: Tensor, estimator: Estimator) -> Tensor:
    """Return `[T]` estimates of the KL, in nats; differentiable. Exponents end at 80."""
    difference_T = policy_T - reference_T.detach()
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return torch.expm1((-difference_T).clamp(max=MAX_EXPONENT)) + difference_T


def kl_loss(policy_T: Tensor, reference_T: Tensor, ratio_T: Tensor, settings: KLSettings) -> Tensor:
    """Return `[T]` terms of the loss, with the gradient that `settings.gradient` asks for.

    Args:
        ratio_T: policy over old at the objective's level, with gradient.
    """
    estimate_T = kl_estimates(policy_T, reference_T, settings.estimator)
    if settings.gradient == "plain":
        return estimate_T
    if settings.gradient == "ratio_corrected":
        return estimate_T * ratio_T
    square_T = kl_estimates(policy_T, reference_T, "k2")
    return estimate_T.detach() + square_T - square_T.detach()


MIN_HORIZON_FACTOR = 0.5
"""Least factor of a step on the coefficient; only steps of more than 2.5 horizons would ask for less."""


class KLController(nn.Module):
    """Base of the controllers, and the fixed one: the coefficient never changes."""

    coefficient: Tensor
    """Weight of the KL now, scalar float64."""

    def __init__(self, settings: s.FixedKLSettings) -> None:
        """Start at the settings' coefficient."""
        super().__init__()
        self.settings = settings
        self.register_buffer("coefficient", torch.tensor(settings.coefficient, dtype=torch.float64))

    def update(self, kl: float, answers: int) -> None:
        """Take in a step's KL.

        Args:
            kl: mean KL of the whole step, in nats, in the target's unit. All ranks must give the same.
            answers: sampled answers of the whole step.

        Raises:
            FloatingPointError: `kl` is not finite: the training goes back to its last checkpoint.
        """
        if not math.isfinite(kl):
            raise FloatingPointError(f"the KL of a step is {kl}, which no controller can follow")
        self.coefficient.mul_(self.factor(kl, answers))

    def factor(self, kl: float, answers: int) -> float:
        """Return what the coefficient is multiplied by."""
        return 1.0


class AdaptiveKLController(KLController):
    """Base of the controllers that follow a target."""

    settings: s.AdaptiveKLSettings

    def error(self, kl: float) -> float:
        """Return the relative distance from the target, within +-max_error."""
        bound = self.settings.max_error
        return min(max(kl / self.settings.target - 1, -bound), bound)


class ProportionalKLController(AdaptiveKLController):
    """Multiplies by `1 + gain e`, whatever the number of answers."""

    settings: s.ProportionalKLSettings

    def factor(self, kl: float, answers: int) -> float:
        """Return `1 + gain e`."""
        return 1 + self.settings.gain * self.error(kl)


class ExponentialKLController(AdaptiveKLController):
    """Multiplies by `exp(gain e)`: errors of either sign change the logarithm by as much."""

    settings: s.ProportionalKLSettings

    def factor(self, kl: float, answers: int) -> float:
        """Return `exp(gain e)`."""
        return math.exp(self.settings.gain * self.error(kl))


class HorizonKLController(AdaptiveKLController):
    """Multiplies by `1 + e answers / horizon`: larger steps change more."""

    settings: s.HorizonKLSettings

    def factor(self, kl: float, answers: int) -> float:
        """Return `1 + e answers / horizon`, at least 0.5: a coefficient never reaches 0."""
        return max(MIN_HORIZON_FACTOR, 1 + self.error(kl) * answers / self.settings.horizon)


CONTROLLERS: dict[str, type[KLController]] = {
    "fixed": KLController,
    "proportional": ProportionalKLController,
    "exponential": ExponentialKLController,
    "horizon": HorizonKLController,
}
"""Every controller by the name that recipes use; the keys are those of `catalog.KL_CONTROLLERS`."""


def kl_controller(name: str, values: Mapping[str, Any]) -> KLController:
    """Make a controller.

    Raises:
        ConfigError: no such controller or setting, with the nearest that there is, or a value out of range.
    """
    settings = kl_controller_settings(name, values)
    if is_import_path(name):
        controller: KLController = import_of_class(name, OwnKLController, OWN_CONTROLLER_REMEDY).controller(
            settings
        )
        return controller
    return CONTROLLERS[name](settings)
