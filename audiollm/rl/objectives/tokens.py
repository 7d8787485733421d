"""Objectives on pairs that read distributions at each token: token-level DPO and CRINGE.

Notation: w the chosen answer, l the rejected one; r = log policy(y) - log reference(y); s the logistic function;
b = `beta`; D(y) the sum over the answer's tokens of KL(reference || policy) at that place (`kl_T`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs, sum_by_index
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import CringeSettings, TDPO2Settings, TDPOSettings
from audiollm.rl.objectives.terms import pair_metrics


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
