"""Pairs and single answers from scored rollouts, for the objectives of `objectives` on fresh answers (online DPO, RFT).

Shapes: A answers, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import Pairs, Singles


def best_and_worst_rollouts(reward_A: Tensor, group_A: Tensor) -> Pairs:
    """Return the best and the worst answer of each group, for online DPO (arXiv 2402.04792).

    Groups whose rewards are all equal have no pair. NaN rewards are left out; of equal rewards the first counts.
    """
    chosen, rejected = [], []
    for answers in _scored_groups(reward_A, group_A):
        rewards = reward_A[answers]
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        if rewards[best] > rewards[worst]:
            chosen.append(int(answers[best]))
            rejected.append(int(answers[worst]))
    indices = torch.tensor([chosen, rejected], dtype=torch.long, device=reward_A.device)
    return Pairs(indices[0], indices[1])


def accepted_rollouts(reward_A: Tensor, group_A: Tensor, min_reward: float, per_group: int = 1) -> Singles:
    """Return the best answers of each group whose reward is at least `min_reward`, for online RFT (arXiv 2308.01825).

    NaN rewards are left out; of equal rewards the first come first.

    Args:
        per_group: most answers of a group.
    """
    accepted: list[int] = []
    for answers in _scored_groups(reward_A, group_A):
        ranked = answers[torch.argsort(reward_A[answers], descending=True, stable=True)][:per_group]
        accepted += ranked[reward_A[ranked] >= min_reward].tolist()
    return Singles(torch.tensor(accepted, dtype=torch.long, device=reward_A.device))


def _scored_groups(reward_A: Tensor, group_A: Tensor) -> list[Tensor]:
    """Return the answers with a reward of each group that has any, by number."""
    scored = torch.nonzero(~reward_A.isnan()).flatten()
    return [scored[group_A[scored] == group] for group in group_A[scored].unique()]
