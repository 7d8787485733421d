"""Quantities of a whole optimizer step, or of the steps before it, that some objectives need. All are pure functions.

Shapes: P pairs, N single answers, M mismatched answers; "of the step" means all packs, micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import required_tensor


@dataclass(frozen=True)
class StepFigures:
    """Figures that a call cannot compute from its own items when the step has others.

    `kl`, `running_mean` and `margin_center` come from outside and are always required by the objectives that read
    them. The others may be None in a call that holds all items of the step: they are then computed from the call.
    """

    tokens_per_answer: Tensor | float | None = None
    """Mean number of tokens of the answers under cross entropy, for `average: token`."""
    kl: Tensor | None = None
    """KL of policy to reference on mismatched pairs (`mismatched_kl`), scalar, in nats (KTO)."""
    running_mean: Tensor | None = None
    """Running mean of all implicit rewards (`RunningMean`), scalar (BCO's delta)."""
    margin_center: Tensor | None = None
    """Running mean of the implicit margins, scalar (beta-DPO's M0)."""
    margin_mean: Tensor | None = None
    """Mean implicit margin of the step at the base beta, scalar (beta-DPO at the level of the batch)."""
    partners: TransportPartners | None = None
    """Partners of the pairs of this call (AOT)."""

    def required(self, name: str) -> Tensor:
        """Return the figure `name`.

        Raises:
            ValueError: the figure is None.
        """
        return required_tensor(self, name, f"this objective needs the step's {name}")


@dataclass(frozen=True)
class TransportPartners:
    """The values that AOT compares each pair's two values with; detached."""

    of_first_P: Tensor
    of_second_P: Tensor


def transport_partners(first_P: Tensor, second_P: Tensor) -> TransportPartners:
    """Match two sets of values by rank: the optimal transport between them on a line.

    Args:
        first_P: of all pairs of the step: policy margins (`aot`) or chosen log ratios (`aot_unpaired`).
        second_P: of all pairs of the step: reference margins, or rejected log ratios.
    """
    first_P, second_P = first_P.detach(), second_P.detach()
    return TransportPartners(_at_same_rank(first_P, second_P), _at_same_rank(second_P, first_P))


def _at_same_rank(values_P: Tensor, partner_values_P: Tensor) -> Tensor:
    partners_P = torch.empty_like(partner_values_P)
    partners_P[torch.argsort(values_P, stable=True)] = partner_values_P.sort(stable=True).values
    return partners_P


def mismatched_kl(policy_M: Tensor, reference_M: Tensor) -> Tensor:
    """KTO's reference point: `max(0, mean(log policy - log reference))` over answers beside prompts of others.

    Args:
        policy_M: summed log-probabilities of each answer after the prompt of another sample, of the whole step.
        reference_M: the same under the reference.

    Returns:
        Scalar without gradient.
    """
    return (policy_M - reference_M).mean().detach().clamp(min=0)


@dataclass(frozen=True)
class RunningMean:
    """A mean over steps; `updated` returns the next one, and both fields belong in a checkpoint."""

    value: Tensor
    """Scalar float64."""
    count: Tensor
    """Values seen, scalar float64."""

    @classmethod
    def start(cls) -> RunningMean:
        """Return the mean before the first step."""
        return cls(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))

    def updated(self, values_N: Tensor, momentum: float | None = None) -> RunningMean:
        """Take in the values of a whole step.

        Args:
            momentum: None: the mean of all values ever seen (BCO in TRL). Otherwise the new mean is
                `momentum * old + (1 - momentum) * step's mean`, from the first step's mean on (beta-DPO takes 0.9).
        """
        values_N = values_N.detach().to(self.value)
        count = self.count + len(values_N)
        if momentum is None or not bool(self.count):
            return RunningMean(self.value + (values_N - self.value).sum() / count.clamp(min=1), count)
        return RunningMean(momentum * self.value + (1 - momentum) * values_N.mean(), count)
