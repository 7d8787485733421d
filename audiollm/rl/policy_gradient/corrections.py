"""Mismatch between the engine that sampled (behaviour) and the training's own forward pass (old), and weights for it.

Shapes: T tokens of all answers of a call, flat; A answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import sum_by_index
from audiollm.rl.objectives.terms import MAX_EXPONENT
from audiollm.rl.policy_gradient.settings import CorrectionSettings


@dataclass(frozen=True)
class MismatchFigures:
    """Distance of old from behaviour over a step, as sums that the training adds over packs and ranks."""

    sums: Tensor
    """float64 `[4]`: sum of k3 over tokens, tokens, weights beyond the bounds, weights."""
    largest_log_ratio: Tensor
    """float64 scalar: largest |log old - log behaviour| of a token; over ranks by maximum."""

    def __add__(self, other: MismatchFigures) -> MismatchFigures:
        """Return the figures of both sets of tokens."""
        largest = torch.maximum(self.largest_log_ratio, other.largest_log_ratio)
        return MismatchFigures(self.sums + other.sums, largest)

    def values(self) -> dict[str, float]:
        """Return the figures for the log.

        `mismatch_kl`: KL(behaviour || old) per token by k3, in nats; `mismatch_largest`: largest ratio of old to
        behaviour, or of behaviour to old, of a token; `mismatch_beyond`: share of the weights outside of the bounds.
        """
        k3, tokens, beyond, weights = self.sums.tolist()
        return {
            "mismatch_kl": k3 / max(tokens, 1),
            "mismatch_largest": float(self.largest_log_ratio.clamp(max=MAX_EXPONENT).exp()),
            "mismatch_beyond": beyond / max(weights, 1),
        }


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights that turn means over tokens sampled by behaviour into means over old; without gradient."""

    weight_T: Tensor
    """Factor on each token's loss; 0 on masked tokens."""
    log_weight_A: Tensor
    """log of each answer's weight: of the sequence, or the sum over its tokens (VESPO)."""
    kept_T: Tensor
    """bool: False on masked tokens, which leave sums and denominators."""
    figures: MismatchFigures


def importance_weights(
    behaviour_T: Tensor,
    old_T: Tensor,
    answer_T: Tensor,
    num_answers: int,
    settings: CorrectionSettings,
    kept_T: Tensor | None = None,
) -> ImportanceWeights:
    """Compute importance weights old / behaviour, truncated or masked, per token or per sequence.

    Truncated weights are biased and never large; masked ones drop what is outside of the bounds. At the level of
    sequences, untruncated weights make the mean gradient that of samples from old; per token they do so for the
    token alone, given the tokens before it. Sources: truncated importance sampling (TIS) and its masked form, as in
    TRL 1.16's `vllm_importance_sampling_mode`.

    Args:
        behaviour_T: log-probability of each token under the distribution that it was sampled from.
        old_T: the same under the policy in the training's own forward pass, before the updates.
        kept_T: bool, tokens that count; None: all. The others have no part in weights and figures.
    """
    kept_T = torch.ones_like(answer_T, dtype=torch.bool) if kept_T is None else kept_T
    ratio_T = torch.where(kept_T, (old_T - behaviour_T).detach(), 0.0)  # of logarithms: log(old / behaviour)
    ratio_A = sum_by_index(ratio_T, answer_T, num_answers)
    by_sequence = settings.level == "sequence"
    log_weight_T = ratio_A[answer_T] if by_sequence else ratio_T
    bounded_T, beyond_T = _bounded(log_weight_T, settings)
    unmasked_T = kept_T & ~beyond_T if settings.mode == "mask" else kept_T
    sums_A = sum_by_index(torch.where(unmasked_T, bounded_T, 0.0), answer_T, num_answers)
    return ImportanceWeights(
        torch.where(unmasked_T, bounded_T.clamp(max=MAX_EXPONENT).exp(), 0.0),
        _bounded(ratio_A, settings)[0] if by_sequence else sums_A,
        unmasked_T,
        _mismatch_figures(ratio_T, beyond_T, kept_T, answer_T, num_answers, by_sequence),
    )


def _bounded(log_weight: Tensor, settings: CorrectionSettings) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the weights within the bounds, and bool: which were outside of them."""
    low = log_weight.new_tensor(0.0 if settings.floor is None else settings.floor).log()
    high = log_weight.new_tensor(torch.inf if settings.cap is None else settings.cap).log()
    is_beyond = (log_weight > high) | (log_weight < low)
    if settings.mode == "mask":
        return log_weight, is_beyond
    return torch.minimum(torch.maximum(log_weight, low), high), is_beyond


def _mismatch_figures(
    ratio_T: Tensor, beyond_T: Tensor, kept_T: Tensor, answer_T: Tensor, num_answers: int, by_sequence: bool
) -> MismatchFigures:
    ratio_N = ratio_T[kept_T].double()
    k3 = (torch.expm1(ratio_N.clamp(max=MAX_EXPONENT)) - ratio_N).sum()
    tokens, beyond = kept_T.sum().double(), (beyond_T & kept_T).sum().double()
    weights = tokens
    if by_sequence:
        kept_A = torch.zeros(num_answers, dtype=torch.bool, device=answer_T.device)
        beyond_A = kept_A.clone()
        kept_A[answer_T[kept_T]] = True
        beyond_A[answer_T[beyond_T & kept_T]] = True
        weights, beyond = kept_A.sum().double(), beyond_A.sum().double()
    largest = ratio_N.abs().max() if len(ratio_N) else ratio_N.new_zeros(())
    return MismatchFigures(torch.stack([k3, tokens, beyond, weights]), largest)
