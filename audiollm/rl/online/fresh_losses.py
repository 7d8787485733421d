"""Losses on fresh answers, behind one protocol: policy gradients, and objectives on pairs or single answers of them.

The losses of all packs and ranks add up to that of the step: policy gradients are divided by the step's tokens or
answers, objectives by its pairs or single answers.

Shapes: T tokens of a pack, A answers of it, I items (pairs or single answers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import AnswerLogprobs, Pairs, Singles
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.recipe.ranks import Ranks
from audiollm.rl.critic.settings import CriticChoice
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.online.objectives import FreshObjective
from audiollm.rl.online.rollout_step import RolloutStep, group_numbers
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.policy_gradient.catalog import PolicyTerm
from audiollm.rl.policy_gradient.losses import (
    PolicyLoss,
    Regularizers,
    StepCounts,
    policy_loss,
    value_loss,
)
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.selection import accepted_rollouts, best_and_worst_rollouts
from audiollm.rl.preference.batches import MicroBatch, groups_to
from audiollm.rl.preference.statistics import StepStatistics
from audiollm.rl.preference.task import on_device, request_of

ITEMS = "/items"
"""Ends the names of sums that count the items which have a figure."""


@dataclass(frozen=True)
class FreshAnswers:
    """The answers of a pack, before the updates on them."""

    logprobs: AnswerLogprobs
    """Old, and the reference where there is one, without gradient."""
    reward_A: Tensor
    """NaN for answers that are not trained on."""
    group_A: Tensor
    advantage_T: Tensor
    """0 for tokens that are not trained on."""


@dataclass(frozen=True)
class CriticTargets:
    """What the critic's values of a pack are compared with."""

    old_T: Tensor
    """The values before the updates."""
    return_T: Tensor
    """The returns that GAE estimates."""

    def to(self, device: torch.device) -> CriticTargets:
        """Return them on a device."""
        return CriticTargets(self.old_T.to(device), self.return_T.to(device))


@dataclass(frozen=True)
class PackLogprobs:
    """A pack in an update."""

    number: int
    """Number of the pack among those of the step."""
    answers: AnswerLogprobs
    """Under the policy now, with gradient, and what else the loss asked for."""
    tokens: RolloutLogprobs
    """The same with old, reference and advantages."""
    counts: StepCounts
    """Tokens and answers of the whole step."""
    regularizers: Regularizers
    values: CriticTargets | None = None
    """Where a critic is trained."""


class StepLoss(Protocol):
    """The loss of a step's answers."""

    is_trained: bool
    """Whether the step changes the policy; the same on all ranks."""

    def __call__(self, pack: PackLogprobs) -> PolicyLoss:
        """Compute a pack's share of the loss."""

    def means(self, sums: Mapping[str, float], counts: StepCounts) -> dict[str, float]:
        """Turn the sums of all packs and ranks into the figures of the step."""


class FreshLoss(Protocol):
    """What the answers of steps are trained with."""

    def request(self, temperature: float) -> TokenRequest:
        """Return the figures per token that the loss reads in an update."""

    def modules(self) -> dict[str, nn.Module]:
        """Return what it remembers between steps, for the checkpoint."""

    def trained_answers(self, rollout_step: RolloutStep) -> list[int]:
        """Return the numbers of the answers that have a part in the loss: the others need no pass through the model."""

    def of_step(self, packs: Sequence[FreshAnswers], counts: StepCounts) -> StepLoss:
        """Prepare the loss of a step. Called on every rank, once a step.

        Args:
            counts: of the whole step.
        """


@dataclass(frozen=True)
class PolicyGradientLoss:
    """A policy gradient: the loss of every token by its advantage."""

    term: PolicyTerm
    ranks: Ranks
    reads_entropy: bool
    """Whether the entropy has a part in the loss."""
    learns_without_advantage: bool
    """Whether there is a loss beside that of the advantages: a KL, an entropy bonus, a critic, or PTX."""
    critic: CriticChoice | None = None
    """How the critic is trained, where there is one."""

    def request(self, temperature: float) -> TokenRequest:
        """See `FreshLoss`."""
        has_critic = self.critic is not None
        return TokenRequest(
            reference=False, temperature=temperature, entropy=self.reads_entropy, value=has_critic
        )

    def modules(self) -> dict[str, nn.Module]:
        """See `FreshLoss`: nothing is remembered."""
        return {}

    def trained_answers(self, rollout_step: RolloutStep) -> list[int]:
        """See `FreshLoss`: all."""
        return list(range(len(rollout_step.rollouts)))

    def of_step(self, packs: Sequence[FreshAnswers], counts: StepCounts) -> StepLoss:
        """See `FreshLoss`: a step whose advantages are all 0 changes nothing, unless something else is learned."""
        has_advantages = any(bool((pack.advantage_T != 0).any()) for pack in packs)
        moves = any(self.ranks.gather(has_advantages)) or self.learns_without_advantage
        return GradientOfStep(self.term, moves and float(counts.sums[0]) > 0, self.critic)


@dataclass
class GradientOfStep:
    """The `StepLoss` of a policy gradient."""

    term: PolicyTerm
    is_trained: bool
    critic: CriticChoice | None = None

    def __call__(self, pack: PackLogprobs) -> PolicyLoss:
        """See `StepLoss`: with a critic, its loss is added."""
        actor_loss = policy_loss(self.term, pack.tokens, pack.counts, pack.regularizers)
        if self.critic is None:
            return actor_loss
        critic_loss = _critic_loss(self.critic, pack)
        return PolicyLoss(actor_loss.loss + critic_loss.loss, {**actor_loss.sums, **critic_loss.sums})

    def means(self, sums: Mapping[str, float], counts: StepCounts) -> dict[str, float]:
        """See `StepLoss`: means per token, and the KL per answer as the controllers' targets have it.

        Where speech is told apart, `kl_text` and `kl_audio` add up to `kl`.
        """
        means = {name: value / float(counts.tokens) for name, value in sums.items()}
        if "value_error" in means:
            means |= _critic_figures(means)
        for name in ("kl", "kl_audio"):
            if name in means:
                means[name] *= float(counts.tokens / counts.answers)
        if "kl_audio" in means:
            means["kl_text"] = means["kl"] - means["kl_audio"]
        return means


def _critic_loss(critic: CriticChoice, pack: PackLogprobs) -> PolicyLoss:
    """Compute a pack's share of the critic's loss; its sums are over the tokens that count."""
    value_T, targets, mask_T = pack.answers.value_T, pack.values, pack.tokens.mask_T
    assert value_T is not None and targets is not None
    share = value_loss(value_T, targets.old_T, targets.return_T, mask_T, pack.counts.tokens, critic)
    now_T = value_T.detach().double()
    figures = {
        "value": now_T,
        "value_error": (now_T - targets.return_T).square(),
        "return": targets.return_T,
        "squared_return": targets.return_T.square(),
    }
    if critic.clip is not None:
        figures["value_clipped"] = (now_T - targets.old_T).abs() > critic.clip
    sums = {name: figure_T[mask_T].double().sum() for name, figure_T in figures.items()}
    return PolicyLoss(critic.weight * share, sums)


def _critic_figures(means: dict[str, float]) -> dict[str, float]:
    """Turn the mean square of the returns, which it takes out, into the share of their variance that is explained."""
    variance = means.pop("squared_return") - means["return"] ** 2
    return {"value_explained": 1 - means["value_error"] / variance} if variance > 1e-12 else {}


class ObjectiveLoss:
    """An objective of `rl.objectives` on pairs (online DPO) or on single answers (online RFT) of each group."""

    def __init__(self, objective: FreshObjective, leave_out: bool, ranks: Ranks) -> None:
        """`leave_out`: truncated answers are not trained on."""
        self._objective, self._leave_out, self._ranks = objective, leave_out, ranks
        self._terms: list[ObjectiveTerm] = [objective.term]
        self._statistics = StepStatistics(self._terms, ranks)

    def request(self, temperature: float) -> TokenRequest:
        """See `FreshLoss`; the reference's log-probabilities are those from before the updates."""
        needed = request_of(self._terms)
        return TokenRequest(
            reference=False, temperature=temperature, kl=needed.kl, collision=needed.collision
        )

    def modules(self) -> dict[str, nn.Module]:
        """See `FreshLoss`: running means, for the objectives that have them."""
        return {"means": self._statistics.means} if self._objective.remembers else {}

    def trained_answers(self, rollout_step: RolloutStep) -> list[int]:
        """See `FreshLoss`: those of the pairs, or the single answers."""
        answers: list[int] = objective_answers(self._objective, self._leave_out, rollout_step).tolist()
        return answers

    def of_step(self, packs: Sequence[FreshAnswers], counts: StepCounts) -> StepLoss:
        """See `FreshLoss`."""
        micro = [self._micro(pack) for pack in packs]
        items = sum(self._ranks.gather(sum(batch.num_items for batch in micro)))
        figures = self._statistics.of_step(micro, [pack.logprobs for pack in packs], []) if items else []
        return ObjectiveOfStep(self._terms, micro, figures, items)

    def _micro(self, pack: FreshAnswers) -> MicroBatch[Any]:
        groups = chosen_answers(self._objective, pack.reward_A, pack.group_A)
        lengths_A = torch.bincount(pack.logprobs.answer_T, minlength=pack.logprobs.num_answers)
        return MicroBatch(None, groups, num_items(groups), lengths_A)


class ObjectiveOfStep:
    """The `StepLoss` of an objective."""

    def __init__(
        self,
        terms: Sequence[ObjectiveTerm],
        micro: Sequence[MicroBatch[Any]],
        figures: Sequence[Any],
        items: int,
    ) -> None:
        self._terms, self._micro, self._figures, self._items = terms, micro, figures, items
        self.is_trained = items > 0

    def __call__(self, pack: PackLogprobs) -> PolicyLoss:
        """See `StepLoss`."""
        device = pack.answers.policy_T.device
        answers = replace(pack.answers, reference_T=pack.tokens.reference_T)
        groups = groups_to(self._micro[pack.number].groups, device)
        figures = on_device(self._figures[pack.number], device)
        losses = mixed_losses(self._terms, answers, groups, figures)
        sums: dict[str, Tensor] = {}
        for name, value_I in losses.metrics.items():
            applies_I = ~value_I.isnan()
            sums[name] = value_I[applies_I].double().sum()
            sums[name + ITEMS] = applies_I.double().sum()
        return PolicyLoss(losses.loss_I.sum() / self._items, sums)

    def means(self, sums: Mapping[str, float], counts: StepCounts) -> dict[str, float]:
        """See `StepLoss`: means over the items that a figure applies to, and the number of items."""
        means = {
            name: value / sums[name + ITEMS]
            for name, value in sums.items()
            if not name.endswith(ITEMS) and sums[name + ITEMS]
        }
        return {**means, "items": float(self._items)}


def chosen_answers(objective: FreshObjective, reward_A: Tensor, group_A: Tensor) -> Pairs | Singles:
    """Return the pairs or single answers of groups that an objective is trained with."""
    if objective.kind == "pairs":
        return best_and_worst_rollouts(reward_A, group_A)
    if objective.judges_all:
        scored_N = torch.nonzero(~reward_A.isnan()).flatten()
        return Singles(scored_N, desirable_N=reward_A[scored_N] >= objective.min_reward)
    return accepted_rollouts(reward_A, group_A, objective.min_reward, objective.per_group)


def objective_answers(objective: FreshObjective, leave_out: bool, rollout_step: RolloutStep) -> Tensor:
    """Return the numbers of the answers of a step that an objective is trained with, in order.

    Args:
        leave_out: truncated answers are not trained on.
    """
    reward_A = rollout_step.reward_A
    if leave_out:
        reward_A = reward_A.masked_fill(rollout_step.truncated_A, torch.nan)
    groups = chosen_answers(objective, reward_A, group_numbers(rollout_step))
    if isinstance(groups, Pairs):
        return torch.cat([groups.chosen_P, groups.rejected_P]).unique()
    return groups.answer_N.unique()


def num_items(groups: Pairs | Singles) -> int:
    """Return the number of pairs or single answers."""
    return len(groups.chosen_P) if isinstance(groups, Pairs) else len(groups.answer_N)


def fresh_loss(config: PolicyTrainingConfig, ranks: Ranks) -> FreshLoss:
    """Return the loss that the settings ask for."""
    objective = config.fresh_objective
    if objective is not None:
        return ObjectiveLoss(objective, config.truncated == "leave_out", ranks)
    has_kl = config.kl is not None and config.kl.place == "loss"
    learns_more = has_kl or config.critic is not None or config.ptx is not None or bool(config.entropy_weight)
    reads_entropy = bool(config.entropy_weight) or config.top_entropy < 1
    return PolicyGradientLoss(config.policy_term, ranks, reads_entropy, learns_more, config.critic)
