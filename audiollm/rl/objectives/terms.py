"""Parts that several objectives are made of: sums of a pair, cross entropy, smoothed sigmoid loss, figures of pairs.

Shapes: as in `answers`: P pairs, I items, A answers, E tokens of items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, ItemTokens, Pairs
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import DivergenceSettings, PairedSettings, SFTAverage

MAX_EXPONENT = 80.0
"""Largest exponent: exp(80) is finite in float32 and bfloat16."""


MAX_SQUARED = 1e18
"""Largest distance that is squared: its square is finite in float32."""


@dataclass(frozen=True)
class PairRatios:
    """Log-probabilities of the two answers of each pair, with LD-DPO's weights where those are set."""

    chosen_P: Tensor
    """log policy / reference of the chosen answer."""
    rejected_P: Tensor
    chosen_policy_P: Tensor
    """log policy of the chosen answer."""
    rejected_policy_P: Tensor

    @property
    def margin_P(self) -> Tensor:
        """Difference of the two log ratios."""
        return self.chosen_P - self.rejected_P


def pair_ratios(answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings) -> PairRatios:
    """Return the summed log-probabilities of each pair, the tokens beyond the shared length times `ld_alpha`."""
    if settings.ld_alpha is None:
        return PairRatios(
            answers.ratios_A[pairs.chosen_P],
            answers.ratios_A[pairs.rejected_P],
            answers.sums_A[pairs.chosen_P],
            answers.sums_A[pairs.rejected_P],
        )
    shared_P = torch.minimum(answers.lengths_A[pairs.chosen_P], answers.lengths_A[pairs.rejected_P])
    chosen = _desensitized(answers, pairs.chosen_P, shared_P, settings)
    rejected = _desensitized(answers, pairs.rejected_P, shared_P, settings)
    return PairRatios(chosen[0], rejected[0], chosen[1], rejected[1])


def _desensitized(
    answers: AnswerLogprobs, answer_P: Tensor, shared_P: Tensor, settings: PairedSettings
) -> tuple[Tensor, Tensor]:
    """Return LD-DPO's log ratio and log-probability of one answer of each pair."""
    tokens = answers.tokens_of(answer_P)
    weight_E = _tail_weight(tokens, shared_P, settings.ld_alpha)
    policy_P = tokens.sum(answers.policy_T, weight_E)
    if settings.ld_reference:
        return tokens.sum(answers.ratio_T, weight_E), policy_P
    return policy_P - tokens.sum(answers.required("reference_T")), policy_P


def _tail_weight(tokens: ItemTokens, shared_P: Tensor, alpha: float | None) -> Tensor:
    shared_E = shared_P[tokens.item_E]
    is_tail_E = tokens.position_E >= shared_E
    return torch.where(is_tail_E, shared_E.new_tensor(alpha), shared_E.new_tensor(1.0))


def divergence_margin(ratios: PairRatios, settings: DivergenceSettings) -> Tensor:
    """Return the difference of the scores f'(policy / reference) of the chosen and the rejected answer (f-DPO)."""
    return divergence_score(ratios.chosen_P, settings) - divergence_score(ratios.rejected_P, settings)


def divergence_score(ratio_I: Tensor, settings: DivergenceSettings) -> Tensor:
    """Return f'(t) at t = policy / reference, up to a constant that pairs cancel. arXiv 2309.16240.

    reverse KL `log t`; forward KL `1 - 1/t`; Jensen-Shannon `log(2t / (t + 1))`; alpha
    `(t^(a-1) - 1) / (a - 1)`. Exponents end at 80, where float32 does.

    Args:
        ratio_I: log t.
    """
    kind, excess = settings.f_divergence, settings.f_alpha - 1
    if kind == "forward_kl":
        return -torch.expm1((-ratio_I).clamp(max=MAX_EXPONENT))
    if kind == "js_divergence":
        return math.log(2) + functional.logsigmoid(ratio_I)
    if kind == "alpha_divergence" and abs(excess) >= 1e-6:
        return torch.expm1((excess * ratio_I).clamp(max=MAX_EXPONENT)) / excess
    return ratio_I


def smoothed_sigmoid_loss(logit_I: Tensor, label_smoothing: float) -> Tensor:
    """Return `-(1 - e) log sigmoid(x) - e log sigmoid(-x)`."""
    right_I, wrong_I = functional.logsigmoid(logit_I), functional.logsigmoid(-logit_I)
    return -(1 - label_smoothing) * right_I - label_smoothing * wrong_I


def bounded_square(distance_I: Tensor) -> Tensor:
    """Return the squared distances; beyond 1e18, which only exponential scores reach, they stay finite and constant."""
    return distance_I.clamp(-MAX_SQUARED, MAX_SQUARED).square()


def cross_entropy_of(
    answers: AnswerLogprobs, answer_I: Tensor, average: SFTAverage, figures: StepFigures
) -> Tensor:
    """Return the cross entropy of one answer per item.

    With `token` the mean over the step's items is the mean over all their tokens: each item's sum is divided by
    `figures.tokens_per_answer`, by default the mean length of the answers of this call. With `sequence` each item
    is the mean over its own tokens.
    """
    if average == "sequence":
        return -answers.means_A[answer_I]
    tokens = figures.tokens_per_answer
    per_answer = answers.lengths_A[answer_I].mean().clamp(min=1) if tokens is None else tokens
    return -answers.sums_A[answer_I] / per_answer


def policy_pair_weights(answers: AnswerLogprobs, pairs: Pairs) -> Tensor:
    """Return WPO's weight of each pair: the product over its answers of exp(mean(log p - log sum p^2)), detached.

    Source: arXiv 2406.11827, equation 2 with the alignment of its section 3.
    """
    with torch.no_grad():
        aligned_T = answers.policy_T - answers.required("log_collision_T")
        sums_A = torch.zeros_like(answers.lengths_A).index_add(0, answers.answer_T, aligned_T)
        means_A = sums_A / answers.lengths_A.clamp(min=1)
        return (means_A[pairs.chosen_P] + means_A[pairs.rejected_P]).exp()


def pair_losses(
    answers: AnswerLogprobs,
    pairs: Pairs,
    settings: PairedSettings,
    loss_P: Tensor,
    ratios: PairRatios,
) -> ItemLosses:
    """Return the losses, weighted by the policy where that is set, with the figures of the implicit rewards."""
    if settings.policy_weighting:
        loss_P = loss_P * policy_pair_weights(answers, pairs)
    beta = settings.beta
    return ItemLosses(loss_P, pair_metrics(answers, pairs, beta * ratios.chosen_P, beta * ratios.rejected_P))


def pair_metrics(
    answers: AnswerLogprobs, pairs: Pairs, chosen_reward_P: Tensor, rejected_reward_P: Tensor
) -> dict[str, Tensor]:
    """Return the figures of pairs: implicit rewards, their difference, whether it is positive, and lengths."""
    chosen_P, rejected_P = chosen_reward_P.detach(), rejected_reward_P.detach()
    return {
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
        "margin": chosen_P - rejected_P,
        "accuracy": (chosen_P > rejected_P).to(chosen_P),
        "logp_chosen": answers.sums_A[pairs.chosen_P].detach(),
        "logp_rejected": answers.sums_A[pairs.rejected_P].detach(),
        "length_chosen": answers.lengths_A[pairs.chosen_P],
        "length_rejected": answers.lengths_A[pairs.rejected_P],
    }
