"""Objectives on pairs that do not reward length: R-DPO, SamPO, LD-DPO. SimPO is in `reference_free`.

Notation: w the chosen answer, l the rejected one; r = log policy(y) - log reference(y); |y| the number of tokens;
s the logistic function; b = `beta`, e = `label_smoothing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.pairs import dpo
from audiollm.rl.objectives.settings import LDDPOSettings, RDPOSettings, SamPOSettings
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
