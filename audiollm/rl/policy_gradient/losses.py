"""The loss of a call as its share of the step's: surrogate, KL, entropy, critic and PTX, each over a global normaliser.

The losses of all packs, micro-batches and ranks add up to the loss of the step, whatever the split: every sum is
divided by counts of the whole step.

Shapes: T tokens of all answers of a call, flat; A answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from audiollm.rl.policy_gradient.catalog import PolicyTerm
from audiollm.rl.policy_gradient.kl import kl_estimates, kl_loss
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import Average, KLSettings, ValueLossSettings
from audiollm.rl.policy_gradient.surrogates import SurrogateLosses, surrogate_losses


@dataclass(frozen=True)
class StepCounts:
    """What a whole step is divided by."""

    sums: Tensor
    """float64 `[3]`: tokens that count, answers with any, tokens above the entropy threshold (or all)."""
    max_tokens: int | None = None
    """Most tokens that an answer may have, for `average: fixed`."""
    entropy_threshold: Tensor | None = None
    """Entropy from which a token has a policy loss (`entropy_threshold`); None: every token has."""

    @classmethod
    def of(
        cls,
        mask_T: Tensor,
        answer_T: Tensor,
        num_answers: int,
        max_tokens: int | None = None,
        entropy_T: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> StepCounts:
        """Count the tokens of one call.

        Args:
            mask_T: bool, tokens that count (`RolloutLogprobs.mask_T`).
            entropy_T, threshold: with top-entropy tokens, the entropy of each token and the step's threshold.
        """
        lengths_A = torch.bincount(answer_T[mask_T], minlength=num_answers)
        above_T = mask_T
        if threshold is not None and entropy_T is not None:
            above_T = mask_T & (entropy_T.detach() >= threshold)
        counts = [mask_T.sum(), (lengths_A > 0).sum(), above_T.sum()]
        return cls(torch.stack(counts).double(), max_tokens, threshold)

    def __add__(self, other: StepCounts) -> StepCounts:
        """Return the counts of both calls. An all-reduce of `sums` does the same over ranks."""
        return replace(self, sums=self.sums + other.sums)

    @property
    def tokens(self) -> Tensor:
        """Tokens that count, scalar, at least 1."""
        return self.sums[0].clamp(min=1)

    @property
    def answers(self) -> Tensor:
        """Answers with any token that counts, scalar, at least 1."""
        return self.sums[1].clamp(min=1)

    @property
    def entropy_tokens(self) -> Tensor:
        """Tokens with an entropy bonus, scalar, at least 1."""
        return self.sums[2].clamp(min=1)


@dataclass(frozen=True)
class Regularizers:
    """Terms beside the surrogate; weights may come from a controller."""

    kl: KLSettings | None = None
    kl_weight: float | Tensor = 0.0
    """Weight of the KL in the loss (beta), of all tokens or `[T]` of each."""
    entropy_weight: float = 0.0
    """Weight of the mean entropy per token of the step, which is subtracted whatever the objective's average."""


@dataclass(frozen=True)
class PolicyLoss:
    """A call's share of the loss of a step."""

    loss: Tensor
    """Scalar with gradient; the shares of all calls add up."""
    sums: dict[str, Tensor]
    """Sums over the tokens that count, detached, by figure: `clipped_low`, `clipped_high` (counts), `ratio`, and where
    these are given `kl`, its part `kl_audio` and `entropy`. Over `StepCounts.tokens` they are means, over `answers`
    means per answer."""


def policy_loss(
    term: PolicyTerm, tokens: RolloutLogprobs, counts: StepCounts, regularizers: Regularizers | None = None
) -> PolicyLoss:
    """Compute this call's share of the loss of a step.

    `mean over the step of (surrogate x importance weight + kl_weight x KL) - entropy_weight x mean entropy`. Tokens
    below the entropy threshold have neither surrogate nor bonus, and count in the surrogate's mean (TRL).

    Args:
        counts: of the whole step.

    Raises:
        ValueError: a field or a count that the settings need is None.
    """
    added = regularizers or Regularizers()
    losses = surrogate_losses(term, tokens)
    acting_T = _acting_tokens(tokens, counts)
    total_T = torch.where(acting_T, _corrected(losses, tokens), 0.0)
    if added.kl is not None and added.kl.place == "loss":
        kl_T = kl_loss(tokens.policy_T, tokens.required("reference_T"), losses.ratio_T, added.kl)
        total_T = total_T + torch.where(tokens.mask_T, added.kl_weight * kl_T, 0.0)
    loss = step_average(total_T, tokens, counts, term.settings.average)
    if added.entropy_weight:
        entropy = torch.where(acting_T, tokens.required("entropy_T"), 0.0).sum()
        loss = loss - added.entropy_weight * entropy / counts.entropy_tokens.to(entropy)
    return PolicyLoss(loss, _figure_sums(losses, tokens, added.kl or KLSettings()))


def _acting_tokens(tokens: RolloutLogprobs, counts: StepCounts) -> Tensor:
    """Return bool `[T]`: tokens that count and whose entropy before the updates reaches the step's threshold."""
    if counts.entropy_threshold is None:
        return tokens.mask_T
    entropy_T = tokens.required("entropy_T") if tokens.old_entropy_T is None else tokens.old_entropy_T
    return tokens.mask_T & (entropy_T.detach() >= counts.entropy_threshold)


def _corrected(losses: SurrogateLosses, tokens: RolloutLogprobs) -> Tensor:
    """Return the losses times the importance weights, where those are not in them already."""
    if tokens.correction is None or losses.includes_correction:
        return losses.loss_T
    return losses.loss_T * tokens.correction.weight_T.to(losses.loss_T)


def _figure_sums(losses: SurrogateLosses, tokens: RolloutLogprobs, kl: KLSettings) -> dict[str, Tensor]:
    figures = {
        "clipped_low": losses.clipped_low_T,
        "clipped_high": losses.clipped_high_T,
        "ratio": losses.ratio_T.detach(),
    }
    if tokens.reference_T is not None:
        figures["kl"] = kl_estimates(tokens.policy_T.detach(), tokens.reference_T, kl.estimator)
        if tokens.is_code_T is not None:
            figures["kl_audio"] = torch.where(tokens.is_code_T, figures["kl"], 0.0)
    if tokens.entropy_T is not None:
        figures["entropy"] = tokens.entropy_T.detach()
    return {name: value_T[tokens.mask_T].double().sum() for name, value_T in figures.items()}


def step_average(loss_T: Tensor, tokens: RolloutLogprobs, counts: StepCounts, average: Average) -> Tensor:
    """Return this call's share of the step's average; masked tokens have no part.

    Raises:
        ValueError: `average: fixed` without `counts.max_tokens`.
    """
    sums_A = tokens.sum_A(loss_T)
    if average == "token":
        return sums_A.sum() / counts.tokens.to(sums_A)
    if average == "answer":
        sums_A = sums_A / tokens.lengths_A().clamp(min=1)
    share = sums_A.sum() / counts.answers.to(sums_A)
    if average == "fixed":
        if counts.max_tokens is None:
            raise ValueError("average: fixed divides by max_tokens, which was not given")
        share = share / counts.max_tokens
    return share


def value_loss(
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    mask_T: Tensor,
    tokens: Tensor | float,
    settings: ValueLossSettings,
) -> Tensor:
    """Return this call's share of `mean of max((V - R)^2, (V_clipped - R)^2) / 2` over the tokens of the step.

    V_clipped is V within `clip` of the value before the updates. Sources: PPO's code, arXiv 1707.06347; DeepSpeed-Chat
    clips at 0.2.

    Args:
        value_T: the critic's values, with gradient.
        old_value_T: those before the updates.
        return_T: targets (`RawAdvantages.return_T`).
        mask_T: bool, tokens that count.
        tokens: tokens of the whole step that count.
    """
    error_T = (value_T - return_T.detach()).square()
    if settings.clip is not None:
        near_T = old_value_T.detach() + (value_T - old_value_T.detach()).clamp(-settings.clip, settings.clip)
        error_T = torch.maximum(error_T, (near_T - return_T.detach()).square())
    total = torch.where(mask_T, error_T, 0.0).sum() / 2
    return total / torch.as_tensor(tokens).to(total)


def ptx_loss(policy_T: Tensor, tokens: Tensor | float, weight: float) -> Tensor:
    """Return this call's share of `weight x mean cross entropy` of other data beside the rollouts (InstructGPT's PTX).

    Source: arXiv 2203.02155.

    Args:
        policy_T: log-probabilities of the target tokens of that data, with gradient.
        tokens: such tokens of the whole step.
    """
    total = -policy_T.sum()
    return weight * total / torch.as_tensor(tokens).to(total)


def entropy_threshold(entropy_N: Tensor, share: float) -> Tensor:
    """Return the entropy above which the given share of a step's tokens lies.

    Source: arXiv 2506.01939 (share 0.2); TRL's `top_entropy_quantile`.

    Args:
        entropy_N: of all tokens that count of all packs and ranks of the step.

    Raises:
        ValueError: `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of top-entropy tokens must be in (0, 1], not {share}")
    if not len(entropy_N):
        return entropy_N.new_zeros(())
    ordered_N = entropy_N.detach().sort().values  # torch.quantile refuses more than 16 million values
    place = round((1 - share) * (len(ordered_N) - 1), 9)
    low, high = ordered_N[math.floor(place)], ordered_N[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)
