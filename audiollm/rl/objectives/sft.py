"""Cross entropy on good answers: an objective of its own, a term of others, and the loss of PTX data."""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerLogprobs,
    ItemLosses,
    LabelledSteps,
    Lists,
    Pairs,
)
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import SFTSettings
from audiollm.rl.objectives.terms import cross_entropy_of


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
