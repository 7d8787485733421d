"""Objectives on lists of answers to one prompt: LiPO-lambda, PRO, RRHF, DPO after Plackett and Luce, D2O, SPPO soft.

Notation: r_i = log policy(y_i) - log reference(y_i); m_i the mean log-probability per token; c_i the score of
entry i; b = `beta`; s the logistic function. A list's loss is a sum over its comparisons.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Lists, sum_by_index
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import (
    D2OSettings,
    LiPOSettings,
    PROSettings,
    ReferencedSettings,
    RRHFSettings,
    SPPOSettings,
)
from audiollm.rl.objectives.terms import cross_entropy_of


def lipo_lambda(
    answers: AnswerLogprobs, lists: Lists, settings: LiPOSettings, figures: StepFigures
) -> ItemLosses:
    """Listwise preference optimisation with lambda weights: sum over c_i > c_j of `L_ij log(1 + exp(-b (r_i - r_j)))`.

    `L_ij = |G_i - G_j| |1 / log(1 + k_i) - 1 / log(1 + k_j)|`, gain `G = 2^c - 1`, k_i the rank of b r_i in the list
    from 1; a constant to the gradient. Scores are meant to be in [0, 1]. Default: b 0.05. Source: arXiv 2402.01878.
    """
    reward_L = settings.beta * answers.ratios_A[lists.answer_L]
    weight_LL = _lambda_weights(lists, reward_L)
    loss_LL = weight_LL * functional.softplus(reward_L[None] - reward_L[:, None])
    return ItemLosses(_per_list(loss_LL, lists.better_LL, lists), list_metrics(answers, lists, reward_L))


def _lambda_weights(lists: Lists, reward_L: Tensor) -> Tensor:
    """Return L_ij. Ranks have no gradient, so neither have these."""
    gain_L = torch.exp2(lists.score_L.to(reward_L)) - 1
    rank_L = lists.ranked_LL(reward_L).sum(0) + 1
    discount_L = 1 / torch.log1p(rank_L.to(reward_L))
    return (gain_L[:, None] - gain_L[None]).abs() * (discount_L[:, None] - discount_L[None]).abs()


def pro(answers: AnswerLogprobs, lists: Lists, settings: PROSettings, figures: StepFigures) -> ItemLosses:
    """Preference ranking optimisation, plus cross entropy on the best answer. Needs no reference.

    Sum over k of `-log( exp(m_k u_kk) / (exp(m_k u_kk) + sum over c_i < c_k of exp(m_i u_ki)) )`, with the inverse
    temperatures u_ki = c_k - c_i and u_kk = the largest of them (1 with `dynamic_temperature: false`), plus
    `sft_weight (length - 1)^2` CE(best), a mean over that answer's tokens. Default: `sft_weight` 0.05. Source:
    arXiv 2306.17492.
    """
    mean_L = answers.means_A[lists.answer_L]
    logit_LL = mean_L[None] * _inverse_temperatures(lists, mean_L, settings.dynamic_temperature)
    place_L = torch.arange(len(mean_L), device=mean_L.device)
    is_self_LL = place_L[:, None] == place_L[None]
    candidates_LL = logit_LL.masked_fill(~(lists.better_LL | is_self_LL), -torch.inf)
    loss_L = torch.logsumexp(candidates_LL, 1) - logit_LL.diagonal()
    loss_G = sum_by_index(loss_L, lists.list_L, lists.num_lists)
    best_G = lists.answer_L[lists.entries_at(0)]
    factor_G = settings.sft_weight * (lists.lengths_I - 1).square().to(loss_G)
    entropy_G = cross_entropy_of(answers, best_G, "sequence", figures)
    return ItemLosses(loss_G + factor_G * entropy_G, list_metrics(answers, lists, mean_L))


def _inverse_temperatures(lists: Lists, like_L: Tensor, dynamic: bool) -> Tensor:
    """Return c_row - c_column for worse columns, and the row's largest of these on the diagonal."""
    if not dynamic:
        return torch.ones(len(like_L), len(like_L), dtype=like_L.dtype, device=like_L.device)
    score_L = lists.score_L.to(like_L)
    differences_LL = (score_L[:, None] - score_L[None]) * lists.better_LL
    return differences_LL + torch.diag(differences_LL.amax(1))


def rrhf(answers: AnswerLogprobs, lists: Lists, settings: RRHFSettings, figures: StepFigures) -> ItemLosses:
    """Rank responses: sum over c_i < c_j of `max(0, m_i - m_j)`, plus `sft_weight` CE(best). Needs no reference.

    Step figure, with `sft_average: token`: `tokens_per_answer` of the best answers. Default: `sft_weight` 1. Source:
    arXiv 2304.05302.
    """
    mean_L = answers.means_A[lists.answer_L]
    loss_G = _per_list(torch.relu(mean_L[None] - mean_L[:, None]), lists.better_LL, lists)
    best_G = lists.answer_L[lists.entries_at(0)]
    entropy_G = cross_entropy_of(answers, best_G, settings.sft_average, figures)
    return ItemLosses(loss_G + settings.sft_weight * entropy_G, list_metrics(answers, lists, mean_L))


def dpo_plackett_luce(
    answers: AnswerLogprobs, lists: Lists, settings: ReferencedSettings, figures: StepFigures
) -> ItemLosses:
    """DPO for rankings: sum over k of `-log( exp(b r_k) / sum over i ranked at or after k of exp(b r_i) )`.

    Over two answers it is DPO. Equal scores are ranked by place. Default: b 0.1. Source: arXiv 2305.18290,
    appendix A.3.
    """
    reward_L = settings.beta * answers.ratios_A[lists.answer_L]
    return ItemLosses(plackett_luce_losses(reward_L, lists), list_metrics(answers, lists, reward_L))


def plackett_luce_losses(value_L: Tensor, lists: Lists) -> Tensor:
    """Return the negative log-likelihood of each list's ranking under Plackett and Luce's model of choices."""
    remaining_LL = (
        value_L[None].expand(len(value_L), -1).masked_fill(~lists.same_LL | lists.ahead_LL.T, -torch.inf)
    )
    return sum_by_index(torch.logsumexp(remaining_LL, 1) - value_L, lists.list_L, lists.num_lists)


def d2o(answers: AnswerLogprobs, lists: Lists, settings: D2OSettings, figures: StepFigures) -> ItemLosses:
    """Distributional dispreference: `-log s( (b / K) sum over k of r_k - alpha r_l )`.

    l is the negative answer, the entry of the lowest score in its list; the K others are samples of the policy
    itself. The paper's two references differ by answer, which `reference_T` allows. Defaults: b = alpha = 0.1.
    Source: "negating negatives", arXiv 2403.03419.
    """
    ratio_L = answers.ratios_A[lists.answer_L]
    negative_G = ratio_L[lists.entries_at(-1)]
    samples_G = sum_by_index(ratio_L, lists.list_L, lists.num_lists) - negative_G
    count_G = (lists.lengths_I - 1).clamp(min=1)
    loss_G = -functional.logsigmoid(settings.beta * samples_G / count_G - settings.alpha * negative_G)
    return ItemLosses(loss_G, list_metrics(answers, lists, settings.beta * ratio_L))


def sppo_soft(
    answers: AnswerLogprobs, lists: Lists, settings: SPPOSettings, figures: StepFigures
) -> ItemLosses:
    """Self-play with estimated win rates: sum over the list of `(r_i - (c_i - 1/2) / b)^2`.

    The score c_i is the probability that answer i beats an answer of the policy. A list of two with 1 and 0 is
    `sppo_hard`. Default: b 0.001 (the paper's eta = 1 / b = 1000). Source: arXiv 2405.00675, equation 4.7.
    """
    ratio_L = answers.ratios_A[lists.answer_L]
    target_L = (lists.score_L.to(ratio_L) - 0.5) / settings.beta
    loss_G = sum_by_index((ratio_L - target_L).square(), lists.list_L, lists.num_lists)
    return ItemLosses(loss_G, list_metrics(answers, lists, settings.beta * ratio_L))


def _per_list(value_LL: Tensor, mask_LL: Tensor, lists: Lists) -> Tensor:
    """Return the sum of each list's masked comparisons."""
    return sum_by_index((value_LL * mask_LL).sum(1), lists.list_L, lists.num_lists)


def list_metrics(answers: AnswerLogprobs, lists: Lists, reward_L: Tensor) -> dict[str, Tensor]:
    """Return the figures of lists: rewards of best and worst entry, the share of comparisons in order, and lengths."""
    reward_L = reward_L.detach()
    best_G, worst_G = lists.entries_at(0), lists.entries_at(-1)
    in_order_LL = (reward_L[:, None] > reward_L[None]).to(reward_L)
    right_G = _per_list(in_order_LL, lists.better_LL, lists)
    return {
        "reward_chosen": reward_L[best_G],
        "reward_rejected": reward_L[worst_G],
        "margin": reward_L[best_G] - reward_L[worst_G],
        "accuracy": right_G / _per_list(torch.ones_like(in_order_LL), lists.better_LL, lists),
        "length_chosen": answers.lengths_A[lists.answer_L[best_G]],
        "length_rejected": answers.lengths_A[lists.answer_L[worst_G]],
    }
