"""Objectives of reward models: Bradley-Terry, Plackett-Luce, regression, and one score per step.

They read scores in place of log-probabilities. Notation: x_y the score of answer y; s the logistic function.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from audiollm.families.logprobs.answers import (
    AnswerScores,
    ItemLosses,
    LabelledSteps,
    Lists,
    Pairs,
    Singles,
    StepScores,
    sum_by_index,
)
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.lists import plackett_luce_losses
from audiollm.rl.objectives.settings import BradleyTerrySettings, ObjectiveSettings


def bradley_terry(
    scores: AnswerScores, pairs: Pairs, settings: BradleyTerrySettings, figures: StepFigures
) -> ItemLosses:
    """Pairwise ranking: `-log s(x_w - x_l - margin) + centering (x_w + x_l)^2`.

    The margin is `margin_P` (0 where the data have none). Default: no centring; TRL suggests 0.01. Sources: margin:
    arXiv 2307.09288; centring: arXiv 2312.09244.
    """
    chosen_P, rejected_P = scores.score_A[pairs.chosen_P], scores.score_A[pairs.rejected_P]
    difference_P = chosen_P - rejected_P
    margin_P = torch.zeros_like(difference_P) if pairs.margin_P is None else pairs.margin_P.to(difference_P)
    loss_P = -functional.logsigmoid(difference_P - margin_P)
    if settings.centering:
        loss_P = loss_P + settings.centering * (chosen_P + rejected_P).square()
    metrics = {
        "score_chosen": chosen_P.detach(),
        "score_rejected": rejected_P.detach(),
        "margin": difference_P.detach(),
        "accuracy": (difference_P > 0).to(loss_P),
    }
    return ItemLosses(loss_P, metrics)


def plackett_luce(
    scores: AnswerScores, lists: Lists, settings: ObjectiveSettings, figures: StepFigures
) -> ItemLosses:
    """Ranking of a list: sum over k of `-log( exp(x_k) / sum over i ranked at or after k of exp(x_i) )`.

    Over two answers it is Bradley-Terry. Equal scores are ranked by place. Source: Plackett 1975, Luce 1959.
    """
    score_L = scores.score_A[lists.answer_L]
    in_order_LL = ((score_L[:, None] > score_L[None]) & lists.better_LL).to(score_L)
    compared_LL = lists.better_LL.to(score_L)
    right_G = sum_by_index(in_order_LL.sum(1), lists.list_L, lists.num_lists)
    accuracy_G = right_G / sum_by_index(compared_LL.sum(1), lists.list_L, lists.num_lists)
    return ItemLosses(plackett_luce_losses(score_L, lists), {"accuracy": accuracy_G})


def regression(
    scores: AnswerScores, singles: Singles, settings: ObjectiveSettings, figures: StepFigures
) -> ItemLosses:
    """Squared error to a rating: `(x_y - score)^2`. Reads `score_N`."""
    score_N = scores.score_A[singles.answer_N]
    error_N = score_N - singles.required("score_N").to(score_N)
    return ItemLosses(error_N.square(), {"score": score_N.detach(), "error": error_N.abs().detach()})


def process(
    scores: StepScores, steps: LabelledSteps, settings: ObjectiveSettings, figures: StepFigures
) -> ItemLosses:
    """Cross entropy of each step's label, a mean over the steps of an answer: `-q log s(x) - (1 - q) log s(-x)`.

    q is `label_S`, 0 or 1 or the share of right continuations. Sources: arXiv 2305.20050; soft labels:
    arXiv 2312.08935.
    """
    label_S = steps.label_S.to(scores.score_S)
    loss_S = functional.binary_cross_entropy_with_logits(scores.score_S, label_S, reduction="none")
    count_I = sum_by_index(torch.ones_like(label_S), scores.answer_S, scores.num_answers).clamp(min=1)
    right_S = ((scores.score_S > 0) == (label_S > 0.5)).to(label_S)
    accuracy_I = sum_by_index(right_S, scores.answer_S, scores.num_answers) / count_I
    return ItemLosses(
        sum_by_index(loss_S, scores.answer_S, scores.num_answers) / count_I, {"accuracy": accuracy_I}
    )
