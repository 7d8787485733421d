"""Objectives on one answer at a time: cross entropy (SFT), KTO, BCO, NPO, DRO.

Notation: r = log policy(y) - log reference(y), summed over the answer's tokens; s the logistic function; b = `beta`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerLogprobs,
    ItemLosses,
    LabelledSteps,
    Lists,
    Pairs,
    Singles,
)
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import (
    DROSettings,
    KTOSettings,
    NPOSettings,
    ReferencedSettings,
    SFTSettings,
)
from audiollm.rl.objectives.terms import cross_entropy_of


def kto(answers: AnswerLogprobs, singles: Singles, settings: KTOSettings, figures: StepFigures) -> ItemLosses:
    """Kahneman-Tversky optimisation: desirable `wd (1 - s(b (r - z)))`, undesirable `wu (1 - s(b (z - r)))`.

    z = max(0, KL of policy to reference), a constant to the gradient. Step figure: `kl`, from mismatched pairs
    (`figures.mismatched_kl`: each answer after another sample's prompt). Defaults: b 0.1, wd = wu = 1. Source:
    arXiv 2402.01306.
    """
    return _anchored(answers, singles, settings, figures.required("kl").detach().clamp(min=0))


def apo_zero_unpaired(
    answers: AnswerLogprobs, singles: Singles, settings: KTOSettings, figures: StepFigures
) -> ItemLosses:
    """Anchored preference optimisation of single answers: `kto` at z = 0, which needs no KL.

    Defaults: b 0.1, weights 1. Source: arXiv 2408.06266; TRL's KTO `loss_type`.
    """
    return _anchored(answers, singles, settings, answers.policy_T.new_zeros(()))


def _anchored(answers: AnswerLogprobs, singles: Singles, settings: KTOSettings, point: Tensor) -> ItemLosses:
    desirable_N, reward_N = singles.required("desirable_N"), _rewards(answers, singles, settings.beta)
    distance_N = reward_N - settings.beta * point.to(reward_N)
    loss_N = torch.where(
        desirable_N,
        settings.desirable_weight * torch.sigmoid(-distance_N),
        settings.undesirable_weight * torch.sigmoid(distance_N),
    )
    return ItemLosses(loss_N, single_metrics(answers, singles, reward_N))


def bco(
    answers: AnswerLogprobs, singles: Singles, settings: ReferencedSettings, figures: StepFigures
) -> ItemLosses:
    """Binary classifier optimisation: desirable `-log s(b r - delta)`, undesirable `-log s(-(b r - delta))`.

    delta is the running mean of b r over all answers, a constant to the gradient. Step figure: `running_mean`
    (`figures.RunningMean`, which the training keeps and saves). Weights that match the two prompt distributions
    (the paper's UDM) go into `weight_I`. Default: b 0.1. Source: arXiv 2404.04656.
    """
    desirable_N, reward_N = singles.required("desirable_N"), _rewards(answers, singles, settings.beta)
    distance_N = reward_N - figures.required("running_mean").detach().to(reward_N)
    loss_N = -functional.logsigmoid(torch.where(desirable_N, distance_N, -distance_N))
    return ItemLosses(loss_N, single_metrics(answers, singles, reward_N))


def npo(answers: AnswerLogprobs, singles: Singles, settings: NPOSettings, figures: StepFigures) -> ItemLosses:
    """Negative preference optimisation: undesirable `(2 / b) log(1 + exp(b r))`, desirable `retain_weight` CE.

    Step figure, with desirable answers: `tokens_per_answer` of these. Items count alike: the share of desirable
    answers in the data sets the balance together with `retain_weight`. Defaults: b 0.1, `retain_weight` 1. Source:
    arXiv 2404.05868 (with its retain loss).
    """
    desirable_N, reward_N = singles.required("desirable_N"), _rewards(answers, singles, settings.beta)
    loss_N = torch.where(desirable_N, 0.0, -2 / settings.beta * functional.logsigmoid(-reward_N))
    desirable = torch.nonzero(desirable_N).flatten()
    if settings.retain_weight and len(desirable):
        entropy = cross_entropy_of(answers, singles.answer_N[desirable], settings.sft_average, figures)
        loss_N = loss_N.index_add(0, desirable, settings.retain_weight * entropy)
    return ItemLosses(loss_N, single_metrics(answers, singles, reward_N))


def dro(answers: AnswerLogprobs, singles: Singles, settings: DROSettings, figures: StepFigures) -> ItemLosses:
    """Direct reward optimisation: `(score - V(x) - tau r)^2 / 2`, for policy and value head together.

    Reads `score_N` (the reward) and `value_A` (V, from a value head on the prompt). Default: tau 1. Source:
    arXiv 2405.19107 (DRO-V).
    """
    reward_N = _rewards(answers, singles, settings.tau)
    residual_N = singles.required("score_N").to(reward_N) - reward_N
    value_N = answers.required("value_A")[singles.answer_N]
    metrics = {**single_metrics(answers, singles, reward_N), "value": value_N.detach()}
    return ItemLosses((residual_N - value_N).square() / 2, metrics)


def _rewards(answers: AnswerLogprobs, singles: Singles, beta: float) -> Tensor:
    return beta * answers.ratios_A[singles.answer_N]


def single_metrics(answers: AnswerLogprobs, singles: Singles, reward_N: Tensor) -> dict[str, Tensor]:
    """Return the figures of single answers: implicit rewards by verdict (NaN for the others), and lengths."""
    reward_N = reward_N.detach()
    metrics = {"reward": reward_N, "length": answers.lengths_A[singles.answer_N]}
    if singles.desirable_N is not None:
        metrics["reward_desirable"] = reward_N.masked_fill(~singles.desirable_N, torch.nan)
        metrics["reward_undesirable"] = reward_N.masked_fill(singles.desirable_N, torch.nan)
    return metrics


def sft(
    answers: AnswerLogprobs, groups: AnswerGroups, settings: SFTSettings, figures: StepFigures
) -> ItemLosses:
    """Cross entropy: of chosen answers of pairs, of the best of lists, of single answers that are not undesirable.

    Step figure, with `average: token`: `tokens_per_answer` of these answers. Undesirable answers cost 0. Needs no
    reference. Default: mean over tokens (TRL's DPO `sft`).
    """
    answer_I, is_trained_I = good_answers(groups)
    trained = torch.nonzero(is_trained_I).flatten()
    entropy = cross_entropy_of(answers, answer_I[trained], settings.average, figures)
    loss_I = answers.policy_T.new_zeros(len(answer_I)).index_add(0, trained, entropy)
    metrics = {
        "nll_per_token": (-answers.means_A[answer_I]).detach().masked_fill(~is_trained_I, torch.nan),
        "length": answers.lengths_A[answer_I],
    }
    return ItemLosses(loss_I, metrics)


def good_answers(groups: AnswerGroups) -> tuple[Tensor, Tensor]:
    """Return an answer per item, and whether it is trained.

    Raises:
        ValueError: labelled steps, which are for process reward models.
    """
    if isinstance(groups, LabelledSteps):
        raise ValueError("sft takes pairs, lists or singles, not labelled steps")
    if isinstance(groups, Pairs):
        answer_I = groups.chosen_P
    elif isinstance(groups, Lists):
        answer_I = groups.answer_L[groups.entries_at(0)]
    elif groups.desirable_N is not None:
        return groups.answer_N, groups.desirable_N
    else:
        answer_I = groups.answer_N
    return answer_I, torch.ones_like(answer_I, dtype=torch.bool)
