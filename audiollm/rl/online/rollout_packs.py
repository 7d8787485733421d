"""The packs of a step: whole groups of answers that go through the model together.

Shapes: T tokens of a pack, flat; A answers of a pack; G groups of it; F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from audiollm.errors import BadSample
from audiollm.families.policy import Policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.rollout_step import RolloutStep, StepColumns, selected_answers
from audiollm.rl.online.steps import StepReward


@dataclass(frozen=True)
class RolloutPack:
    """Whole groups of answers that go through the model together; none in an idle one."""

    batch: Any
    places: list[int]
    """Numbers of its answers among those of this rank."""
    group_A: Tensor
    num_groups: int
    reward_A: Tensor
    reward_AF: Tensor
    greedy_reward_G: Tensor | None
    behaviour_T: Tensor
    truncated_A: Tensor
    steps: list[list[StepReward]]
    """Rewards of the steps of each answer, where the advantage reads them."""


class RolloutPacker:
    """Makes packs of whole groups: as many as the rank with the most has, at least one.

    Args:
        set_aside: where groups go that the policy cannot take.
        max_tokens: of a pack, with padding.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        set_aside: SetAside,
        ranks: Ranks,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._policy, self._set_aside, self._ranks = policy, set_aside, ranks
        self._max_tokens, self._device = max_tokens, device

    def __call__(self, rollout_step: RolloutStep, trained: Sequence[int]) -> list[RolloutPack]:
        """Return the packs of this rank's answers. Called on every rank.

        Args:
            trained: numbers of the answers that have a part in the loss; the others are in no pack.
        """
        trained_places = set(trained)
        rollout_step = selected_answers(
            rollout_step, [place in trained_places for place in range(len(rollout_step.rollouts))]
        )
        groups, fits = self._encoded(rollout_step)
        rollout_step, trained = selected_answers(rollout_step, fits), list(compress(trained, fits))
        columns = rollout_step.columns()
        plans = self._policy.plan(groups, self._max_tokens) if groups else []
        firsts = [0]
        for group in groups:
            firsts.append(firsts[-1] + len(group))
        packs = [self._pack(columns, plan, groups, firsts) for plan in plans]
        num_packs = max(1, *self._ranks.gather(len(packs)))
        packs += [self._pack(columns, [], groups, firsts) for _ in range(num_packs - len(packs))]
        return [replace(pack, places=[trained[place] for place in pack.places]) for pack in packs]

    def _encoded(self, rollout_step: RolloutStep) -> tuple[list[Sequence[Any]], list[bool]]:
        """The encoded answers of the groups that the policy can take, and which of all answers are among them."""
        groups: list[Sequence[Any]] = []
        fits: list[bool] = []
        for group in rollout_step.groups:
            sampled = [rollout.tokens for rollout in group.rollouts]
            try:
                groups.append(self._policy.encode_sampled(group.prompt.prompted, sampled))
                fits += [True] * len(sampled)
            except BadSample as error:
                self._set_aside.add([error.with_traceback(None)])
                fits += [False] * len(sampled)
        return groups, fits

    def _pack(
        self,
        columns: StepColumns,
        plan: Sequence[int],
        groups: Sequence[Sequence[Any]],
        firsts: Sequence[int],
    ) -> RolloutPack:
        places = [place for group in plan for place in range(firsts[group], firsts[group + 1])]
        encoded = [answer for group in plan for answer in groups[group]]
        greedy = columns.greedy_reward_G
        pack_groups = {group: number for number, group in enumerate(plan)}
        return RolloutPack(
            (self._policy.batch(encoded) if encoded else self._policy.idle_batch()).to(self._device),
            places,
            torch.tensor([pack_groups[int(columns.group_A[place])] for place in places], dtype=torch.long),
            len(plan),
            columns.reward_A[places],
            columns.kept_reward_AF[places],
            None if greedy is None else greedy[list(plan)],
            torch.cat([torch.zeros(0), *(columns.behaviour[place] for place in places)]),
            columns.truncated_A[places],
            [columns.steps[place] for place in places] if columns.steps else [],
        )
