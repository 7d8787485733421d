"""Rewards of the steps of sampled answers (process rewards), at the tokens that end the steps.

Shapes: T tokens of a pack, A answers of it, S steps of their thoughts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.families.policy import Policy
from audiollm.families.rollout import Rollout
from audiollm.rl.policy_gradient.rollout_batch import token_layout
from audiollm.rl.rewards.scoring import RewardScores


@dataclass(frozen=True)
class StepReward:
    """The weighted reward of a step of an answer."""

    text: str
    """The step; empty for the outcome."""
    reward: float
    action: int
    """Number of the sampled token that ends the step."""
    is_outcome: bool = False
    """Whether it is the reward of the whole answer."""


class StepRewarder:
    """Finds the rewards of the steps of answers.

    Rewards whose steps end at the same place are added. Rewards of whole answers are added to the outcome, a last step
    that ends with the answer.

    Args:
        policy: knows which token ends which text.
        weights: of the rewards, by name.
        outcome: whether rewards of whole answers count.
    """

    def __init__(self, policy: Policy[Any, Any, Any], weights: Mapping[str, float], outcome: bool) -> None:
        self._policy, self._weights, self._outcome = policy, dict(weights), outcome

    def __call__(self, rollouts: Sequence[Rollout], scores: RewardScores) -> list[list[StepReward]]:
        """Return the steps of each answer, in order; none where a reward of the answer is missing."""
        return [
            self._of_answer(rollout, scores, place) if scores.kept_A[place] else []
            for place, rollout in enumerate(rollouts)
        ]

    def _of_answer(self, rollout: Rollout, scores: RewardScores, place: int) -> list[StepReward]:
        texts: dict[int | None, str] = {}
        values: dict[int | None, list[float]] = {}
        outcome: list[float] = []
        for name, weight in self._weights.items():
            scored = scores.steps_by_name.get(name)
            steps = None if scored is None else scored[place]
            if steps is not None:
                for step in steps:
                    texts.setdefault(step.end, step.text)
                    values.setdefault(step.end, []).append(weight * step.score)
            elif self._outcome:
                value = scores.by_name[name][place]
                assert value is not None  # a kept answer has all rewards
                outcome.append(weight * value)
        ends = sorted(end for end in values if end is not None)
        actions = self._policy.actions_at(rollout.tokens, rollout.text, ends)
        rewards = [
            StepReward(texts[end], math.fsum(values[end]), action)
            for end, action in zip(ends, actions, strict=True)
        ]
        last = rollout.tokens.num_actions - 1
        if None in values:
            rewards.append(StepReward(texts[None], math.fsum(values[None]), last))
        if outcome:
            rewards.append(StepReward("", math.fsum(outcome), last, is_outcome=True))
        return rewards


def placed_steps(
    steps: Sequence[Sequence[StepReward]], answer_T: Tensor, num_answers: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `[S]` of the steps of a pack's answers: float64 rewards, int64 places of their last tokens in T, and bool
    whether they are outcomes.

    Args:
        steps: of each answer of the pack.
    """
    tokens = token_layout(answer_T, num_answers)
    first_A = torch.bincount(answer_T, minlength=num_answers).cumsum(0)
    first_A = torch.cat([first_A.new_zeros(1), first_A])
    entries = [
        int(first_A[answer]) + step.action
        for answer, answer_steps in enumerate(steps)
        for step in answer_steps
    ]
    flat = [step for answer_steps in steps for step in answer_steps]
    end_S = tokens.token_E[torch.tensor(entries, dtype=torch.long)]
    reward_S = torch.tensor([step.reward for step in flat], dtype=torch.float64)
    return reward_S, end_S, torch.tensor([step.is_outcome for step in flat], dtype=torch.bool)
