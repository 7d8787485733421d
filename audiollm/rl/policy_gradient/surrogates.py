"""Losses per token from the ratio of policy to old and the advantage, before any average.

Notation: r = policy / old at the objective's level, A the advantage, sg a value without gradient. Shapes: T tokens of
all answers, flat; A answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.recipe.plug_ins import import_of_class, is_import_path
from audiollm.rl.objectives.terms import MAX_EXPONENT
from audiollm.rl.policy_gradient.catalog import OWN_OBJECTIVE_REMEDY, OwnPolicyObjective, PolicyTerm
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import (
    CISPOSettings,
    ClipSettings,
    PolicyObjectiveSettings,
    RatioLevel,
    SAPOSettings,
    VESPOSettings,
)

MIN_LOG_WEIGHT, MAX_LOG_WEIGHT = -18.420680743952367, 20.0
"""Bounds of VESPO's log weights: log(1e-8) and 20, those of its authors and of TRL."""


@dataclass(frozen=True)
class SurrogateLosses:
    """Losses of tokens, with what the figures and the KL need."""

    loss_T: Tensor
    """With gradient."""
    ratio_T: Tensor
    """Ratio of policy to old at the objective's level, unclipped, with gradient."""
    clipped_low_T: Tensor
    """bool: the loss is cut off below, where the ratio fell and the advantage is negative."""
    clipped_high_T: Tensor
    """bool: the loss is cut off above, where the ratio rose and the advantage is positive."""
    includes_correction: bool = False
    """Whether the loss is already weighted by the importance weights."""


def ratios(tokens: RolloutLogprobs, level: RatioLevel) -> Tensor:
    """Return `[T]` ratios of policy to old at `level`, with gradient. Exponents end at 80.

    `token`: r_t; `sequence`: `s = exp(mean log r)` (GSPO); `sequence_token`: `sg(s) policy / sg(policy)`;
    `product`: `exp(sum log r)`. Means and sums go over the tokens that count.
    """
    log_ratio_T = tokens.log_ratio_T
    if level == "token":
        return log_ratio_T.clamp(max=MAX_EXPONENT).exp()
    sums_A = tokens.sum_A(log_ratio_T)
    log_ratio_A = sums_A if level == "product" else sums_A / tokens.lengths_A().clamp(min=1)
    if level != "sequence_token":
        return log_ratio_A.clamp(max=MAX_EXPONENT).exp()[tokens.answer_T]
    token_gradient_T = tokens.policy_T - tokens.policy_T.detach()  # 0, with the gradient of the token alone
    return (log_ratio_A.detach()[tokens.answer_T] + token_gradient_T).clamp(max=MAX_EXPONENT).exp()


def clipped_surrogate(tokens: RolloutLogprobs, settings: ClipSettings) -> SurrogateLosses:
    """PPO's `-min(r A, clip(r, 1 - low, 1 + high) A)`.

    `max_ratio` (two-sided): the first r is at most that. `dual_clip` c: where A < 0, the loss is at most `-c A`.
    Sources: arXiv 1707.06347; asymmetric: arXiv 2503.14476 (DAPO); dual: arXiv 1912.09729; two-sided: arXiv
    2505.07291; sequences: arXiv 2507.18071 (GSPO, GSPO-token), 2602.05261 (LUSPO).
    """
    advantage_T, ratio_T = tokens.advantage_T.detach(), ratios(tokens, settings.level)
    free_T = ratio_T if settings.max_ratio is None else ratio_T.clamp(max=settings.max_ratio)
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    gain_T = torch.minimum(free_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
    if settings.dual_clip is not None:
        bounded_T = torch.maximum(gain_T, settings.dual_clip * advantage_T)
        gain_T = torch.where(advantage_T < 0, bounded_T, gain_T)
    fixed_T = ratio_T.detach()
    return SurrogateLosses(
        -gain_T, ratio_T, (fixed_T < low) & (advantage_T < 0), (fixed_T > high) & (advantage_T > 0)
    )


def cispo(tokens: RolloutLogprobs, settings: CISPOSettings) -> SurrogateLosses:
    """Clipped importance sampling: `-sg(min(r, max_ratio)) A log policy`, so that no token loses its gradient.

    Source: arXiv 2506.13585 (MiniMax-M1); the bound of 5 is that of ScaleRL, arXiv 2510.13786.
    """
    advantage_T, ratio_T = tokens.advantage_T.detach(), ratios(tokens, "token")
    fixed_T = ratio_T.detach()
    loss_T = -fixed_T.clamp(max=settings.max_ratio) * advantage_T * tokens.policy_T
    return _without_low(loss_T, ratio_T, (fixed_T > settings.max_ratio) & (advantage_T > 0))


def sapo(tokens: RolloutLogprobs, settings: SAPOSettings) -> SurrogateLosses:
    """Soft adaptive gate: `-(4 / t) sigmoid(t (r - 1)) A`, with t by the sign of A.

    Source: arXiv 2511.20347.
    """
    advantage_T, ratio_T = tokens.advantage_T.detach(), ratios(tokens, "token")
    temperature_T = torch.where(
        advantage_T > 0,
        advantage_T.new_tensor(settings.temperature_positive),
        advantage_T.new_tensor(settings.temperature_negative),
    )
    loss_T = -(4 / temperature_T) * torch.sigmoid(temperature_T * (ratio_T - 1)) * advantage_T
    return _without_low(loss_T, ratio_T, torch.zeros_like(advantage_T, dtype=torch.bool))


def vespo(tokens: RolloutLogprobs, settings: VESPOSettings) -> SurrogateLosses:
    """Soft weights of sequences: `-sg(e^l w^k e^(-l w)) A log policy`, w the product of the answer's ratios.

    k and l go by the sign of A. w includes the correction's weights. Log ratios of tokens are cut to +-20, those of
    sequences to log(1e-8) and 20, as TRL has it. Source: arXiv 2602.10693.
    """
    advantage_T = tokens.advantage_T.detach()
    log_ratio_T = tokens.log_ratio_T.detach().clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    log_weight_A = tokens.sum_A(log_ratio_T)
    if tokens.correction is not None:
        log_weight_A = log_weight_A + tokens.correction.log_weight_A
    log_weight_T = log_weight_A.clamp(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT)[tokens.answer_T]
    power_T, decay_T = (
        torch.where(advantage_T >= 0, advantage_T.new_tensor(positive), advantage_T.new_tensor(negative))
        for positive, negative in (
            (settings.k_positive, settings.k_negative),
            (settings.lambda_positive, settings.lambda_negative),
        )
    )
    weight_T = (decay_T + power_T * log_weight_T - decay_T * log_weight_T.exp()).exp()
    loss_T = -weight_T * advantage_T * tokens.policy_T
    none_T = torch.zeros_like(advantage_T, dtype=torch.bool)
    return SurrogateLosses(loss_T, ratios(tokens, "token"), none_T, none_T, includes_correction=True)


def _without_low(loss_T: Tensor, ratio_T: Tensor, clipped_high_T: Tensor) -> SurrogateLosses:
    return SurrogateLosses(loss_T, ratio_T, torch.zeros_like(clipped_high_T), clipped_high_T)


SURROGATES: dict[type[PolicyObjectiveSettings], Callable[[RolloutLogprobs, Any], SurrogateLosses]] = {
    CISPOSettings: cispo,
    SAPOSettings: sapo,
    VESPOSettings: vespo,
}
"""Functions by the class of their settings; all other settings are those of `clipped_surrogate`."""


def surrogate_losses(term: PolicyTerm, tokens: RolloutLogprobs) -> SurrogateLosses:
    """Return the losses per token of an objective."""
    if is_import_path(term.name):
        function = import_of_class(term.name, OwnPolicyObjective, OWN_OBJECTIVE_REMEDY).function
    else:
        function = SURROGATES.get(type(term.settings), clipped_surrogate)
    losses: SurrogateLosses = function(tokens, term.settings)
    return losses
