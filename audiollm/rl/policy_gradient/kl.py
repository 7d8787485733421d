"""Estimates of KL(policy || reference) from sampled tokens, in the reward or in the loss.

With d = log policy - log reference at a token that the policy sampled: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
k1 and k3 have the KL as their mean; k2 is biased and has less variance. As a term of the loss, only two choices have
the KL's gradient as their mean: k2, and any ratio-corrected one of k1 and k3 (the README has the table).

Source: http://joschu.net/blog/kl-approx.html; gradients: arXiv 2512.02556 (ratio-corrected), verl (`k3+`).
Shapes: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.rl.objectives.terms import MAX_EXPONENT
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
