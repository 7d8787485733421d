"""Fresh rollouts as pairs and single answers, and the objectives on them."""

from __future__ import annotations

import math

import pytest
import torch

from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.policy_gradient.selection import accepted_rollouts, best_and_worst_rollouts
from tests.audiollm.rl.policy_gradient.policy_cases import LENGTHS, rollouts

REWARDS = torch.tensor([0.5, 1.0, math.nan, 0.5, 1.0, 0.0, 1.0, 0.0, math.nan])
GROUPS = torch.tensor([0, 1, 0, 0, 1, 2, 2, 2, 3])
"""Group 0 has two equal rewards, 1 as well, 2 a best and two worst, 3 none."""


def test_the_best_and_the_worst_of_each_group_that_has_any() -> None:
    pairs = best_and_worst_rollouts(REWARDS, GROUPS)
    assert pairs.chosen_P.tolist() == [6]
    assert pairs.rejected_P.tolist() == [5]
    assert len(best_and_worst_rollouts(REWARDS[:2], GROUPS[:2]).chosen_P) == 0


@pytest.mark.parametrize(
    ("least", "per_group", "expected"),
    [
        (1.0, 1, [1, 6]),
        (1.0, 2, [1, 4, 6]),
        (0.5, 1, [0, 1, 6]),
        (0.0, 9, [0, 3, 1, 4, 6, 5, 7]),
        (2.0, 1, []),
    ],
)
def test_the_best_answers_that_are_good_enough(least: float, per_group: int, expected: list[int]) -> None:
    assert accepted_rollouts(REWARDS, GROUPS, least, per_group).answer_N.tolist() == expected


def test_objectives_on_fresh_rollouts() -> None:
    data = rollouts()
    answers = AnswerLogprobs(data.policy, data.answer, len(LENGTHS), data.reference)
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    pairs = best_and_worst_rollouts(rewards, groups)
    loss = mixed_losses([objective_term("dpo", {})], answers, pairs, StepFigures()).loss_I
    margin = 0.1 * (answers.ratios_A[0] - answers.ratios_A[1])
    assert loss.tolist() == pytest.approx([float(torch.log1p((-margin).exp()))])
    singles = accepted_rollouts(rewards, groups, 1.0)
    entropy = mixed_losses([objective_term("sft", {})], answers, singles, StepFigures()).loss_I
    assert entropy.tolist() == pytest.approx([float(-data.policy[data.answer == 0].mean())])
