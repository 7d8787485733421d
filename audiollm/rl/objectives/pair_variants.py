"""Objectives on pairs that read more than two sums: lengths (R-DPO, SamPO, LD-DPO), each token (TDPO, CRINGE), the
recording (OPA-DPO).

Notation: w the chosen answer, l the rejected one, a the chosen answer once more with an altered recording (masked, or
another sample's); r = log policy(y) - log reference(y); |y| the number of tokens; D(y) the sum over the answer's tokens
of KL(reference || policy) at that place (`kl_T`); s the logistic function; b = `beta`, e = `label_smoothing`,
delta = `anchor`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs, sum_by_index
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.pairs import dpo
from audiollm.rl.objectives.settings import (
    CringeSettings,
    LDDPOSettings,
    OPADPOSettings,
    RDPOSettings,
    SamPOSettings,
    TDPO2Settings,
    TDPOSettings,
)
from audiollm.rl.objectives.terms import (
    divergence_margin,
    pair_losses,
    pair_metrics,
    pair_ratios,
    smoothed_sigmoid_loss,
)


def r_dpo(answers: AnswerLogprobs, pairs: Pairs, settings: RDPOSettings, figures: StepFigures) -> ItemLosses:
    """Length-regularised DPO: `-log s(b (r_w - r_l) + alpha (|w| - |l|))`, smoothed as in `dpo`.

    A longer chosen answer needs a smaller margin, so length itself earns no gradient. alpha 0 is DPO.
    Defaults: b 0.1, alpha 0.01 per token. Source: arXiv 2403.19159.
    """
    ratios = pair_ratios(answers, pairs, settings)
    excess_P = answers.lengths_A[pairs.chosen_P] - answers.lengths_A[pairs.rejected_P]
    logit_P = settings.beta * divergence_margin(ratios, settings) + settings.alpha * excess_P
    loss_P = smoothed_sigmoid_loss(logit_P, settings.label_smoothing)
    return pair_losses(answers, pairs, settings, loss_P, ratios)


def sampo(answers: AnswerLogprobs, pairs: Pairs, settings: SamPOSettings, figures: StepFigures) -> ItemLosses:
    """DPO on equally many tokens of both answers: `-log s(b (r'_w - r'_l))`.

    r' sums the log ratios of min(|w|, |l|) tokens of each answer, those with the smallest `draw_T`, which makes a
    uniform draw without replacement; the shorter answer counts whole. On equal lengths it is DPO.
    Default: b 0.1. Source: arXiv 2406.10957.
    """
    shared_P = torch.minimum(answers.lengths_A[pairs.chosen_P], answers.lengths_A[pairs.rejected_P])
    chosen_P = settings.beta * _sampled_ratio(answers, pairs.chosen_P, shared_P)
    rejected_P = settings.beta * _sampled_ratio(answers, pairs.rejected_P, shared_P)
    loss_P = -functional.logsigmoid(chosen_P - rejected_P)
    return ItemLosses(loss_P, pair_metrics(answers, pairs, chosen_P, rejected_P))


def _sampled_ratio(answers: AnswerLogprobs, answer_P: Tensor, shared_P: Tensor) -> Tensor:
    tokens = answers.tokens_of(answer_P)
    is_kept_E = tokens.rank_E(answers.required("draw_T")) < shared_P[tokens.item_E]
    return tokens.sum(answers.ratio_T, is_kept_E.to(shared_P.dtype))


def answer_draws(lengths: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Draw SamPO's random numbers, each answer's from its own seed, so that packing does not change them.

    Args:
        lengths: tokens of each answer.
        seeds: of each answer, made of the run's seed, the step and the sample.

    Returns:
        float64 on the CPU, uniform in [0, 1), answer after answer.
    """
    generator = torch.Generator()
    draws = []
    for length, seed in zip(lengths, seeds, strict=True):
        generator.manual_seed(seed)
        draws.append(torch.rand(length, dtype=torch.float64, generator=generator))
    return torch.cat(draws) if draws else torch.zeros(0, dtype=torch.float64)


def ld_dpo(
    answers: AnswerLogprobs, pairs: Pairs, settings: LDDPOSettings, figures: StepFigures
) -> ItemLosses:
    """Length-desensitised DPO: `dpo` with the tokens beyond min(|w|, |l|) weighted by `ld_alpha`.

    With `ld_reference` (default; paper and TRL) policy and reference are weighted, otherwise the policy alone.
    `ld_alpha` 1 is DPO, and 0 cuts the longer answer. The same two settings work in every objective on pairs with a
    reference. Defaults: b 0.1, `ld_alpha` 0.5. Source: arXiv 2409.06411.
    """
    return dpo(answers, pairs, settings, figures)


def tdpo1(answers: AnswerLogprobs, pairs: Pairs, settings: TDPOSettings, figures: StepFigures) -> ItemLosses:
    """Token-level DPO, first version: `-log s(b (r_w - r_l) - b (D(l) - D(w)))`.

    Reads `kl_T`; where that is 0 it is DPO. Default: b 0.1. Source: TDPO, arXiv 2404.11999.
    """
    chosen_P, rejected_P = _sequence_kls(answers, pairs)
    return _token_level(answers, pairs, settings.beta, settings.beta * (rejected_P - chosen_P))


def tdpo2(answers: AnswerLogprobs, pairs: Pairs, settings: TDPO2Settings, figures: StepFigures) -> ItemLosses:
    """Token-level DPO, second version: `-log s(b (r_w - r_l) - alpha b (D(l) - stop_gradient(D(w))))`.

    Reads `kl_T`; with alpha 0 it is DPO. Defaults: b 0.1, alpha 0.5. Source: TDPO, arXiv 2404.11999.
    """
    chosen_P, rejected_P = _sequence_kls(answers, pairs)
    drift_P = settings.alpha * settings.beta * (rejected_P - chosen_P.detach())
    return _token_level(answers, pairs, settings.beta, drift_P)


def _sequence_kls(answers: AnswerLogprobs, pairs: Pairs) -> tuple[Tensor, Tensor]:
    kl_A = sum_by_index(answers.required("kl_T"), answers.answer_T, answers.num_answers)
    return kl_A[pairs.chosen_P], kl_A[pairs.rejected_P]


def _token_level(answers: AnswerLogprobs, pairs: Pairs, beta: float, drift_P: Tensor) -> ItemLosses:
    chosen_P, rejected_P = beta * answers.ratios_A[pairs.chosen_P], beta * answers.ratios_A[pairs.rejected_P]
    loss_P = -functional.logsigmoid(chosen_P - rejected_P - drift_P)
    metrics = pair_metrics(answers, pairs, chosen_P, rejected_P)
    return ItemLosses(loss_P, {**metrics, "kl_drift": drift_P.detach()})


def cringe(
    answers: AnswerLogprobs, pairs: Pairs, settings: CringeSettings, figures: StepFigures
) -> ItemLosses:
    """Cross entropy on the chosen answer, and on the rejected one a contrast with tokens the policy likes itself.

    `g (CE(w) + weight * mean over t of l of -log s(log p(c_t) - log p(y_t)))`, c_t a token drawn among the policy's
    k likeliest at that place other than y_t (`contrast_T`; the paper draws from k = 5). CE is the mean over the
    answer's tokens. With `gate_temperature` T, g = s((gate_bias - (log p_w - log p_l)) / T), a constant to the
    gradient, closes once the pair is in order (pairwise CRINGE); without, g = 1. Needs no reference.

    Defaults: weight 1, no gate. Sources: arXiv 2211.05826; gate: arXiv 2312.16682.
    """
    contrast_T = -functional.logsigmoid(answers.required("contrast_T") - answers.policy_T)
    contrast_A = sum_by_index(contrast_T, answers.answer_T, answers.num_answers) / answers.lengths_A.clamp(
        min=1
    )
    loss_P = settings.weight * contrast_A[pairs.rejected_P] - answers.means_A[pairs.chosen_P]
    chosen_P, rejected_P = answers.sums_A[pairs.chosen_P], answers.sums_A[pairs.rejected_P]
    if settings.gate_temperature is not None:
        margin_P = (chosen_P - rejected_P).detach()
        loss_P = loss_P * torch.sigmoid((settings.gate_bias - margin_P) / settings.gate_temperature)
    return ItemLosses(loss_P, pair_metrics(answers, pairs, chosen_P, rejected_P))


def opa_dpo(
    answers: AnswerLogprobs, pairs: Pairs, settings: OPADPOSettings, figures: StepFigures
) -> ItemLosses:
    """On-policy alignment: three terms on an answer that corrects the policy's own.

    `-log s(b (r_w - r_l)) - conditional_weight log s(b (r_w - r_a)) + anchors`, the anchors being
    `-anchor_weight log s(b r_w - delta) - rejected_anchor_weight log s(delta - b r_l)
    - altered_anchor_weight log s(delta - b r_a)`, or squared distances with `anchor_loss: squared`. In r_a, policy
    and reference both hear the altered recording. Reads `altered_P`, unless its two weights are 0.

    Defaults: b 0.1, conditional 0.2, anchors 1, 1 and 0, delta 0. Sources: OPA-DPO, arXiv 2501.09695; mDPO,
    arXiv 2406.11839.
    """
    beta = settings.beta
    chosen_P, rejected_P = beta * answers.ratios_A[pairs.chosen_P], beta * answers.ratios_A[pairs.rejected_P]
    loss_P = -functional.logsigmoid(chosen_P - rejected_P)
    loss_P = loss_P + settings.anchor_weight * _anchor(chosen_P, settings, above=True)
    loss_P = loss_P + settings.rejected_anchor_weight * _anchor(rejected_P, settings, above=False)
    metrics = pair_metrics(answers, pairs, chosen_P, rejected_P)
    if settings.conditional_weight or settings.altered_anchor_weight:
        altered_P = beta * answers.ratios_A[_altered(pairs)]
        loss_P = loss_P - settings.conditional_weight * functional.logsigmoid(chosen_P - altered_P)
        loss_P = loss_P + settings.altered_anchor_weight * _anchor(altered_P, settings, above=False)
        metrics["conditional_margin"] = (chosen_P - altered_P).detach()
    return ItemLosses(loss_P, metrics)


def _anchor(reward_P: Tensor, settings: OPADPOSettings, above: bool) -> Tensor:
    distance_P = reward_P - settings.anchor
    if settings.anchor_loss == "squared":
        return distance_P.square()
    return -functional.logsigmoid(distance_P if above else -distance_P)


def _altered(pairs: Pairs) -> Tensor:
    if pairs.altered_P is None:
        raise ValueError("opa_dpo reads altered_P: the chosen answer with an altered recording")
    return pairs.altered_P
