"""Objectives on pairs with a reference: DPO, the other loss types of TRL 1.16, DPOP, beta-DPO; and SLiC-HF.

Notation: w the chosen answer, l the rejected one; r = log policy(y) - log reference(y), summed over the answer's
tokens; s the logistic function; d = r_w - r_l (with `f_divergence`: the difference of its scores); b = `beta`,
e = `label_smoothing`. All take `(answers, pairs, settings, figures)` and return a loss per pair.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs
from audiollm.rl.objectives.figures import StepFigures, TransportPartners, transport_partners
from audiollm.rl.objectives.settings import (
    AOTSettings,
    BetaDPOSettings,
    DiscoPOPSettings,
    DivergenceSettings,
    DPOPSettings,
    DPOSettings,
    EXOPairSettings,
    IPOSettings,
    PairedSettings,
    RobustDPOSettings,
    SLiCSettings,
)
from audiollm.rl.objectives.terms import (
    MAX_EXPONENT,
    bounded_square,
    cross_entropy_of,
    divergence_margin,
    divergence_score,
    pair_losses,
    pair_metrics,
    pair_ratios,
    smoothed_sigmoid_loss,
)


def dpo(answers: AnswerLogprobs, pairs: Pairs, settings: DPOSettings, figures: StepFigures) -> ItemLosses:
    """Direct preference optimisation: `-(1 - e) log s(b d) - e log s(-b d)`.

    Defaults: b 0.1, e 0 (TRL's `sigmoid`; e > 0 is conservative DPO). Source: arXiv 2305.18290, equation 7.
    """
    ratios = pair_ratios(answers, pairs, settings)
    logit_P = settings.beta * divergence_margin(ratios, settings)
    loss_P = smoothed_sigmoid_loss(logit_P, settings.label_smoothing)
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def hinge(
    answers: AnswerLogprobs, pairs: Pairs, settings: DivergenceSettings, figures: StepFigures
) -> ItemLosses:
    """Hinge on normalised likelihoods: `max(0, 1 - b d)`.

    Default: b 0.1. Source: RSO, arXiv 2309.06657 (`hinge-norm`).
    """
    ratios = pair_ratios(answers, pairs, settings)
    loss_P = torch.relu(1 - settings.beta * divergence_margin(ratios, settings))
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def ipo(answers: AnswerLogprobs, pairs: Pairs, settings: IPOSettings, figures: StepFigures) -> ItemLosses:
    """Identity preference optimisation: `(d' - 1 / (2 b))^2`, d' the difference of the scores divided by the lengths.

    Defaults: b 0.1 (the paper's tau), `length: mean`; `sum` leaves the scores undivided. Source: arXiv 2310.12036,
    equation 17.
    """
    ratios = pair_ratios(answers, pairs, settings)
    if settings.length == "mean":
        margin_P = _margin_per_token(answers, pairs, settings)
    else:
        margin_P = divergence_margin(ratios, settings)
    loss_P = bounded_square(margin_P - 1 / (2 * settings.beta))
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def sigmoid_norm(
    answers: AnswerLogprobs, pairs: Pairs, settings: DivergenceSettings, figures: StepFigures
) -> ItemLosses:
    """DPO on scores divided by the answers' lengths: `-log s(b d')`, with d' as in `ipo`.

    Default: b 0.1. Source: TRL's `sigmoid_norm`; length-normalised DPO of Tulu 3, arXiv 2411.15124.
    """
    loss_P = -functional.logsigmoid(settings.beta * _margin_per_token(answers, pairs, settings))
    return pair_losses(answers, pairs, settings, loss_P, pair_ratios(answers, pairs, settings))


def exo_pair(
    answers: AnswerLogprobs, pairs: Pairs, settings: EXOPairSettings, figures: StepFigures
) -> ItemLosses:
    """Reverse KL to the smoothed preference: `q (log q - log(1 - e)) + (1 - q)(log(1 - q) - log e)`, q = s(b d).

    Defaults: b 0.1, e 1e-3. Source: EXO, arXiv 2402.00856, equation 16.
    """
    ratios = pair_ratios(answers, pairs, settings)
    logit_P = settings.beta * divergence_margin(ratios, settings)
    smoothing = logit_P.new_tensor(settings.label_smoothing)
    right_P = functional.logsigmoid(logit_P) - torch.log1p(-smoothing)
    wrong_P = functional.logsigmoid(-logit_P) - torch.log(smoothing)
    loss_P = torch.sigmoid(logit_P) * right_P + torch.sigmoid(-logit_P) * wrong_P
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def nca_pair(
    answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings, figures: StepFigures
) -> ItemLosses:
    """Noise contrastive alignment: `-log s(b r_w) - log s(-b r_w) / 2 - log s(-b r_l) / 2`.

    Default: b 0.1. Source: arXiv 2402.05369.
    """
    ratios = pair_ratios(answers, pairs, settings)
    chosen_P, rejected_P = settings.beta * ratios.chosen_P, settings.beta * ratios.rejected_P
    pushed_P = functional.logsigmoid(-chosen_P) + functional.logsigmoid(-rejected_P)
    return pair_losses(answers, pairs, settings, -functional.logsigmoid(chosen_P) - pushed_P / 2, ratios)


def robust(
    answers: AnswerLogprobs, pairs: Pairs, settings: RobustDPOSettings, figures: StepFigures
) -> ItemLosses:
    """DPO without bias under flipped labels: `(-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e)`.

    Defaults: b 0.1, e 0.1. Source: arXiv 2403.00409.
    """
    ratios = pair_ratios(answers, pairs, settings)
    logit_P, flipped = settings.beta * divergence_margin(ratios, settings), settings.label_smoothing
    kept_P = -(1 - flipped) * functional.logsigmoid(logit_P)
    loss_P = (kept_P + flipped * functional.logsigmoid(-logit_P)) / (1 - 2 * flipped)
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def bco_pair(
    answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings, figures: StepFigures
) -> ItemLosses:
    """Binary classifier on both answers, without a shift: `-log s(b r_w) - log s(-b r_l)`.

    Default: b 0.1. `bco` is the one for single answers, with its shift. Source: arXiv 2404.04656.
    """
    ratios = pair_ratios(answers, pairs, settings)
    chosen_P = functional.logsigmoid(settings.beta * ratios.chosen_P)
    rejected_P = functional.logsigmoid(-settings.beta * ratios.rejected_P)
    return pair_losses(answers, pairs, settings, -chosen_P - rejected_P, ratios)


def aot(answers: AnswerLogprobs, pairs: Pairs, settings: AOTSettings, figures: StepFigures) -> ItemLosses:
    """Distributional preference: DPO between the sorted policy margins and the sorted reference margins.

    `-(1 - e) log s(b u_k) - e log s(-b u_k)`, u_k the k-th of sort(log p_w - log p_l) minus the k-th of the same
    under the reference. Step figure: `partners`, by default of this call's pairs.

    Defaults: b 0.1, e 0. Source: arXiv 2406.05882 (paired).
    """
    loss_P = _transported(aot_values(answers, pairs, settings), settings, figures.partners)
    return pair_losses(answers, pairs, settings, loss_P, pair_ratios(answers, pairs, settings))


def aot_values(answers: AnswerLogprobs, pairs: Pairs, settings: AOTSettings) -> tuple[Tensor, Tensor]:
    """Return the policy's and the reference's margins: over all pairs of a step they make `transport_partners`."""
    ratios = pair_ratios(answers, pairs, settings)
    policy_P = ratios.chosen_policy_P - ratios.rejected_policy_P
    return policy_P, (policy_P - ratios.margin_P).detach()


def aot_unpaired(
    answers: AnswerLogprobs, pairs: Pairs, settings: AOTSettings, figures: StepFigures
) -> ItemLosses:
    """Distributional preference: as `aot`, between the sorted r_w and the sorted r_l.

    Step figure: `partners`, by default of this call's pairs. The sum over the step's pairs is exact; a pair's own
    loss is the mean of the comparisons that its two answers take part in.

    Defaults: b 0.1, e 0. Source: arXiv 2406.05882 (unpaired).
    """
    loss_P = _transported(aot_unpaired_values(answers, pairs, settings), settings, figures.partners)
    return pair_losses(answers, pairs, settings, loss_P, pair_ratios(answers, pairs, settings))


def aot_unpaired_values(
    answers: AnswerLogprobs, pairs: Pairs, settings: AOTSettings
) -> tuple[Tensor, Tensor]:
    """Return the log ratios of chosen and rejected answers, as `aot_values` does for `aot`."""
    ratios = pair_ratios(answers, pairs, settings)
    return ratios.chosen_P, ratios.rejected_P


def apo_zero(
    answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings, figures: StepFigures
) -> ItemLosses:
    """Anchored: the chosen answer up, the rejected one down: `1 - s(b r_w) + s(b r_l)`.

    For chosen answers that are better than the policy's own. Default: b 0.1. Source: arXiv 2408.06266, equation 7.
    """
    ratios = pair_ratios(answers, pairs, settings)
    loss_P = torch.sigmoid(-settings.beta * ratios.chosen_P) + torch.sigmoid(
        settings.beta * ratios.rejected_P
    )
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def apo_down(
    answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings, figures: StepFigures
) -> ItemLosses:
    """Anchored: both answers down, the rejected one more: `s(b r_w) + 1 - s(b (r_w - r_l))`.

    For chosen answers that are worse than the policy's own. Default: b 0.1. Source: arXiv 2408.06266, equation 8.
    """
    ratios = pair_ratios(answers, pairs, settings)
    loss_P = torch.sigmoid(settings.beta * ratios.chosen_P) + torch.sigmoid(-settings.beta * ratios.margin_P)
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def discopop(
    answers: AnswerLogprobs, pairs: Pairs, settings: DiscoPOPSettings, figures: StepFigures
) -> ItemLosses:
    """Log-ratio modulated loss: `-(1 - m) log s(x) + m exp(-x)`, x = b d, m = s(x / tau).

    The product `m exp(-x)` is taken in logarithms: far negative x, where exp overflows, give 0.
    Defaults: b 0.1, tau 0.05. Source: arXiv 2406.08414, equation 5.
    """
    ratios = pair_ratios(answers, pairs, settings)
    logit_P = settings.beta * divergence_margin(ratios, settings)
    logistic_P = -functional.logsigmoid(logit_P) * torch.sigmoid(-logit_P / settings.tau)
    exponential_P = (functional.logsigmoid(logit_P / settings.tau) - logit_P).clamp(max=MAX_EXPONENT).exp()
    return pair_losses(answers, pairs, settings, logistic_P + exponential_P, ratios)


def sppo_hard(
    answers: AnswerLogprobs, pairs: Pairs, settings: PairedSettings, figures: StepFigures
) -> ItemLosses:
    """Self-play with certain preferences: `(r_w - 1 / (2 b))^2 + (r_l + 1 / (2 b))^2`.

    `sppo_soft` of a list of two with win rates 1 and 0. Default: b 0.1 (TRL's; the paper's eta = 1 / b is 1000).
    Source: arXiv 2405.00675, equation 4.7.
    """
    ratios, target = pair_ratios(answers, pairs, settings), 0.5 / settings.beta
    loss_P = (ratios.chosen_P - target).square() + (ratios.rejected_P + target).square()
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def dpop(answers: AnswerLogprobs, pairs: Pairs, settings: DPOPSettings, figures: StepFigures) -> ItemLosses:
    """DPO-positive: `-log s(b (r_w - r_l - lambda max(0, -r_w)))`: the chosen answer must not become less likely.

    Defaults: b 0.3, lambda (`penalty`) 50. Source: Smaug, arXiv 2402.13228.
    """
    ratios = pair_ratios(answers, pairs, settings)
    penalized_P = ratios.margin_P - settings.penalty * torch.relu(-ratios.chosen_P)
    loss_P = -functional.logsigmoid(settings.beta * penalized_P)
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def beta_dpo(
    answers: AnswerLogprobs, pairs: Pairs, settings: BetaDPOSettings, figures: StepFigures
) -> ItemLosses:
    """DPO with a beta that follows the margins: `-log s(B d)`, B = max(min_beta, b (1 + alpha (M - M0))).

    M is the mean of the implicit margins b d of the step (`level: batch`) or the pair's own (`level: pair`), and M0
    their running mean; both are constants to the gradient. The paper's filter of pairs with an unusual margin is
    not part of it. Step figures: `margin_center` (M0), and `margin_mean` at the level of the batch
    (by default of this call's pairs).

    Defaults: b 0.1, alpha 0.6. Source: arXiv 2407.08639.
    """
    ratios = pair_ratios(answers, pairs, settings)
    margin_P = settings.beta * ratios.margin_P.detach()
    if settings.level == "batch":
        margin_P = margin_P.mean() if figures.margin_mean is None else figures.margin_mean.to(margin_P)
    center = figures.required("margin_center").to(margin_P)
    beta_P = (settings.beta * (1 + settings.alpha * (margin_P - center))).clamp(min=settings.min_beta)
    loss_P = -functional.logsigmoid(beta_P * ratios.margin_P)
    losses = pair_losses(answers, pairs, settings, loss_P, ratios)
    return ItemLosses(losses.loss_I, {**losses.metrics, "beta": beta_P.expand_as(loss_P)})


def slic_hf(
    answers: AnswerLogprobs, pairs: Pairs, settings: SLiCSettings, figures: StepFigures
) -> ItemLosses:
    """Sequence likelihood calibration: `max(0, delta - log p_w + log p_l) + lambda CE(w)`. Needs no reference.

    The paper's regulariser takes a target of its own; here it is the chosen answer. Step figure:
    `tokens_per_answer` of the chosen answers. Defaults: delta (`margin`) 1, lambda (`sft_weight`) 0.5, tuned.
    Source: arXiv 2305.10425.
    """
    chosen_P, rejected_P = answers.sums_A[pairs.chosen_P], answers.sums_A[pairs.rejected_P]
    ranking_P = torch.relu(settings.margin - chosen_P + rejected_P)
    entropy_P = cross_entropy_of(answers, pairs.chosen_P, settings.sft_average, figures)
    metrics = pair_metrics(answers, pairs, chosen_P, rejected_P)
    return ItemLosses(ranking_P + settings.sft_weight * entropy_P, metrics)


def _margin_per_token(answers: AnswerLogprobs, pairs: Pairs, settings: DivergenceSettings) -> Tensor:
    ratios, lengths_A = pair_ratios(answers, pairs, settings), answers.lengths_A.clamp(min=1)
    chosen_P = divergence_score(ratios.chosen_P, settings) / lengths_A[pairs.chosen_P]
    return chosen_P - divergence_score(ratios.rejected_P, settings) / lengths_A[pairs.rejected_P]


def _transported(
    values: tuple[Tensor, Tensor], settings: AOTSettings, partners: TransportPartners | None
) -> Tensor:
    """Return losses per pair whose sum over the step, and its gradient, are those of the sorted comparisons.

    Each comparison belongs to two pairs: each takes half of its value, and the gradient of its own side.
    """
    first_P, second_P = values
    if partners is None:
        partners = transport_partners(first_P, second_P)

    def loss(difference_P: Tensor) -> Tensor:
        return smoothed_sigmoid_loss(settings.beta * difference_P, settings.label_smoothing)

    both_P = loss(first_P - partners.of_first_P) + loss(partners.of_second_P - second_P)
    return both_P - both_P.detach() / 2
