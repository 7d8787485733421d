"""Objectives on pairs without a reference: SimPO, CPO, ORPO.

Notation: w the chosen answer, l the rejected one; p the policy's log-probability summed over the answer's tokens;
m its mean per token; s the logistic function; b = `beta`, e = `label_smoothing`; CE(w) the cross entropy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import CPOSettings, ORPOSettings, SimPOSettings
from audiollm.rl.objectives.terms import (
    MAX_EXPONENT,
    bounded_square,
    cross_entropy_of,
    pair_metrics,
    smoothed_sigmoid_loss,
)

MAX_MEAN_LOGPROB = -1e-12
"""Upper bound of the mean log-probability in the odds: at 0 they are infinite."""


def simpo(answers: AnswerLogprobs, pairs: Pairs, settings: SimPOSettings, figures: StepFigures) -> ItemLosses:
    """Simple preference optimisation: `-log s(b m_w - b m_l - gamma)`, smoothed as in `dpo`, plus `sft_weight` CE(w).

    With `alpha` each m becomes AlphaPO's `(1 - exp(-alpha m)) / alpha`. Step figure, with `sft_weight`:
    `tokens_per_answer` of the chosen answers. Defaults: b 2, gamma 0.5, no SFT. Sources: arXiv 2405.14734;
    AlphaPO: arXiv 2501.03884.
    """
    chosen_P = settings.beta * _shaped(answers.means_A[pairs.chosen_P], settings.alpha)
    rejected_P = settings.beta * _shaped(answers.means_A[pairs.rejected_P], settings.alpha)
    loss_P = smoothed_sigmoid_loss(chosen_P - rejected_P - settings.gamma, settings.label_smoothing)
    return _with_sft(answers, pairs, settings, figures, loss_P, (chosen_P, rejected_P))


def cpo(answers: AnswerLogprobs, pairs: Pairs, settings: CPOSettings, figures: StepFigures) -> ItemLosses:
    """Contrastive preference optimisation: `-log s(b (p_w - p_l))`, smoothed as in `dpo`, plus `sft_weight` CE(w).

    `loss: hinge` is `max(0, 1 - b (p_w - p_l))`; `ipo` is `(m_w - m_l - 1 / (2 b))^2`. `alpha` as in `simpo`. Step
    figure: `tokens_per_answer` of the chosen answers. Defaults: b 0.1, e 0, `sft_weight` 1. Source: arXiv 2401.08417.
    """
    logprobs_A = answers.means_A if settings.loss == "ipo" else answers.sums_A
    chosen_P = settings.beta * _shaped(logprobs_A[pairs.chosen_P], settings.alpha)
    rejected_P = settings.beta * _shaped(logprobs_A[pairs.rejected_P], settings.alpha)
    logit_P = chosen_P - rejected_P
    if settings.loss == "hinge":
        loss_P = torch.relu(1 - logit_P)
    elif settings.loss == "ipo":
        loss_P = bounded_square(logit_P / settings.beta - 1 / (2 * settings.beta))
    else:
        loss_P = smoothed_sigmoid_loss(logit_P, settings.label_smoothing)
    return _with_sft(answers, pairs, settings, figures, loss_P, (chosen_P, rejected_P))


def orpo(answers: AnswerLogprobs, pairs: Pairs, settings: ORPOSettings, figures: StepFigures) -> ItemLosses:
    """Odds ratio preference optimisation: `CE(w) - b log s(log odds_w - log odds_l)`, odds = exp(m) / (1 - exp(m)).

    `sft_on: prompt_and_answer` (TRL) takes the prompt's tokens into CE; the paper's is over the answer. Step figure:
    `tokens_per_answer` of what CE reads. Default: b 0.1. Source: arXiv 2403.07691.
    """
    chosen_P, rejected_P = answers.means_A[pairs.chosen_P], answers.means_A[pairs.rejected_P]
    log_ratio_P = functional.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    if settings.sft_on == "answer":
        entropy_P = cross_entropy_of(answers, pairs.chosen_P, settings.sft_average, figures)
    else:
        entropy_P = _entropy_with_prompt(answers, pairs.chosen_P, settings, figures)
    metrics = pair_metrics(answers, pairs, settings.beta * chosen_P, settings.beta * rejected_P)
    return ItemLosses(entropy_P - settings.beta * log_ratio_P, {**metrics, "sft": entropy_P.detach()})


def _entropy_with_prompt(
    answers: AnswerLogprobs, answer_P: Tensor, settings: ORPOSettings, figures: StepFigures
) -> Tensor:
    sums_P = (answers.sums_A + answers.required("prompt_sum_A"))[answer_P]
    lengths_P = (answers.lengths_A + answers.required("prompt_length_A"))[answer_P]
    if settings.sft_average == "sequence":
        return -sums_P / lengths_P.clamp(min=1)
    tokens = figures.tokens_per_answer
    return -sums_P / (lengths_P.mean().clamp(min=1) if tokens is None else tokens)


def _shaped(logprob_I: Tensor, alpha: float) -> Tensor:
    """Return AlphaPO's reward, which is the log-probability itself at alpha 0."""
    if alpha == 0:
        return logprob_I
    return -torch.expm1((-alpha * logprob_I).clamp(max=MAX_EXPONENT)) / alpha


def _log_odds(mean_I: Tensor) -> Tensor:
    mean_I = mean_I.clamp(max=MAX_MEAN_LOGPROB)
    return mean_I - _log_one_minus_exp(mean_I)


def _log_one_minus_exp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, by the branch that is exact at x; the other never sees it, nor its gradient."""
    is_small = values < -math.log(2)
    small = torch.where(is_small, values, -torch.ones_like(values))
    large = torch.where(is_small, -torch.ones_like(values), values)
    return torch.where(is_small, torch.log1p(-torch.exp(small)), torch.log(-torch.expm1(large)))


def _with_sft(
    answers: AnswerLogprobs,
    pairs: Pairs,
    settings: SimPOSettings | CPOSettings,
    figures: StepFigures,
    loss_P: Tensor,
    rewards: tuple[Tensor, Tensor],
) -> ItemLosses:
    metrics = pair_metrics(answers, pairs, *rewards)
    if settings.sft_weight:
        entropy_P = cross_entropy_of(answers, pairs.chosen_P, settings.sft_average, figures)
        loss_P = loss_P + settings.sft_weight * entropy_P
        metrics["sft"] = entropy_P.detach()
    return ItemLosses(loss_P, metrics)
