"""Dynamic sampling: groups that teach nothing are replaced by those of fresh prompts (DAPO, arXiv 2503.14476).

Which prompts are sampled depends on the seed, the step and what was found in the rounds before; every rank finds the
same. Shapes: A answers, G groups of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from audiollm.codec import Codec
from audiollm.families.policy import Policy
from audiollm.families.rollout import RolloutEngine, RolloutSettings
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.fresh_losses import objective_answers
from audiollm.rl.online.objectives import FreshObjective
from audiollm.rl.online.prompts import Prompt, PromptMaker
from audiollm.rl.online.rollout_step import (
    RolloutMaker,
    RolloutStep,
    group_numbers,
    joined_steps,
    selected_groups,
)
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.steps import StepRewarder
from audiollm.rl.policy_gradient.reward_shaping import groups_without_variance
from audiollm.rl.rewards.scoring import RewardSuite

TeachingGroups = Callable[[RolloutStep], Tensor]
"""A function that tells, as bool `[G]`, which groups change the policy."""


class SamplesSteps(Protocol):
    """Samples and rewards the answers of a step."""

    def __call__(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Sample and reward a group for each prompt; a refill may put others in the place of some."""

    def sampled(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Sample and reward a group for each prompt, and for no other."""

    def greedy(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Answer each prompt once, greedily, and reward the answers."""

    def start(self, prompts: Sequence[Prompt], step: int) -> None:
        """See `RolloutMaker.start`."""


class RefillingMaker:
    """Samples steps, and fresh prompts for groups that teach nothing, until the step is full.

    A step is full with as many groups that teach as a step has prompts. Groups without use are left out of the
    training in any case; they stay in the figures and in the file of the step.

    Args:
        maker: samples and rewards.
        prompts: the prompts of steps and of refills.
        max_refills: most refills of a step; with less to train on after them, the step trains with what it has.
        teaches: which groups are kept.
    """

    def __init__(
        self,
        maker: SamplesSteps,
        prompts: PromptMaker,
        max_refills: int,
        teaches: TeachingGroups,
        ranks: Ranks,
    ) -> None:
        self._maker, self._prompts, self._max_refills = maker, prompts, max_refills
        self._teaches, self._ranks = teaches, ranks

    def sampled(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """See `SamplesSteps.sampled`."""
        return self._maker(prompts, step)

    def greedy(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """See `RolloutMaker.greedy`: nothing is refilled."""
        return self._maker.greedy(prompts, step)

    def start(self, prompts: Sequence[Prompt], step: int) -> None:
        """See `RolloutMaker.start`; which prompts refill the step is found out later."""
        self._maker.start(prompts, step)

    def __call__(self, prompts: Sequence[Prompt], step: int) -> RolloutStep:
        """Sample and reward a step. Called on every rank."""
        every = [self._maker(prompts, step)]
        used_places = set(self._prompts.places(step))
        bad = []
        rounds = 0
        for number in range(self._max_refills):
            teaching = sum(int(self._teaches(rollout_step).sum()) for rollout_step in every)
            lacking = self._prompts.batch_size - self._total(teaching)
            if lacking <= 0:
                break
            candidates = self._prompts.refill_places(step, number, self._max_refills)
            fresh = [place for place in candidates if place not in used_places][:lacking]
            if not fresh:  # every prompt of this round was asked before
                continue
            used_places.update(fresh)
            refill_prompts, refill_bad = self._prompts.read(fresh)
            bad += refill_bad
            every.append(self._maker(refill_prompts, step))
            rounds += 1
        joined = joined_steps(every)
        teaches = self._teaches(joined).tolist()
        figures = {
            "refill_rounds": float(rounds),
            "groups_sampled": float(self._total(len(teaches))),
            "groups_kept": float(self._total(sum(teaches))),
        }
        return replace(
            selected_groups(joined, teaches),
            bad=[*joined.bad, *bad],
            seconds=joined.seconds,
            replaced=selected_groups(joined, [not does_teach for does_teach in teaches]),
            figures=figures,
        )

    def _total(self, count: int) -> int:
        return sum(self._ranks.gather(count))


def maker_of(
    config: PolicyTrainingConfig,
    engine: RolloutEngine[Any],
    policy: Policy[Any, Any, Any],
    rewards: RewardSuite,
    settings: RolloutSettings,
    prompts: PromptMaker,
    ranks: Ranks,
    codec: Codec | None = None,
) -> SamplesSteps:
    """Return what samples and rewards the steps of a training.

    Args:
        policy: that of the engine's model; it knows which token ends which text.
        codec: decodes speech for rewards that hear it; None: none does.
    """
    weights = {term.name: term.weight for term in config.reward_terms}
    steps = StepRewarder(policy, weights, config.reads_outcome) if config.reads_steps else None
    needs_greedy = "greedy_reward_G" in config.advantage_term.reads
    maker = RolloutMaker(engine, rewards, settings, config.group_size, needs_greedy, codec, steps)
    if config.refill is None:
        return maker
    return RefillingMaker(maker, prompts, config.refill.most, teaching_groups(config), ranks)


def with_variance(rollout_step: RolloutStep) -> Tensor:
    """Return bool `[G]`: groups whose answers differ in a reward of the whole answer."""
    return ~groups_without_variance(
        rollout_step.reward_A, group_numbers(rollout_step), len(rollout_step.groups)
    )


def with_variance_of_any(rollout_step: RolloutStep) -> Tensor:
    """Return bool `[G]`: groups whose answers differ in any of the rewards (GDPO)."""
    numbers, count = group_numbers(rollout_step), len(rollout_step.groups)
    flat = [
        groups_without_variance(reward_A, numbers, count)
        for reward_A in rollout_step.kept_reward_AF.unbind(1)
    ]
    return ~torch.stack(flat).all(0)


def with_variance_of_steps(rollout_step: RolloutStep) -> Tensor:
    """Return bool `[G]`: groups whose steps, or whose outcomes, differ in their rewards (process rewards)."""
    numbers, count = group_numbers(rollout_step).tolist(), len(rollout_step.groups)
    differs_G = torch.zeros(count, dtype=torch.bool)
    for is_outcome in (False, True):
        steps = [
            (number, step.reward)
            for number, answer_steps in zip(numbers, rollout_step.steps, strict=True)
            for step in answer_steps
            if step.is_outcome == is_outcome
        ]
        reward_S = torch.tensor([reward for _, reward in steps], dtype=torch.float64)
        group_S = torch.tensor([number for number, _ in steps], dtype=torch.long)
        differs_G |= ~groups_without_variance(reward_S, group_S, count)
    return differs_G


def teaching_groups(config: PolicyTrainingConfig) -> TeachingGroups:
    """Return the function that tells which groups change a policy of these settings."""
    leave_out, objective = config.truncated == "leave_out", config.fresh_objective
    if objective is not None:
        return partial(_with_items, objective, leave_out)
    differs = with_variance_of_steps if config.reads_steps else with_variance
    if config.advantage.name == "gdpo":
        differs = with_variance_of_any
    return partial(_with_whole_answers, differs) if leave_out else differs


def _with_items(objective: FreshObjective, leave_out: bool, rollout_step: RolloutStep) -> Tensor:
    """bool `[G]`: groups with a pair or a single answer that the objective is trained with."""
    numbers = group_numbers(rollout_step)[objective_answers(objective, leave_out, rollout_step)]
    return torch.bincount(numbers, minlength=len(rollout_step.groups)) > 0


def _with_whole_answers(differs: TeachingGroups, rollout_step: RolloutStep) -> Tensor:
    """bool `[G]`: groups that differ, and that have an answer which no limit cut."""
    complete = group_numbers(rollout_step)[~rollout_step.truncated_A]
    return differs(rollout_step) & (torch.bincount(complete, minlength=len(rollout_step.groups)) > 0)
