"""Is a reward model's confidence right? Reliability of its probability that an answer is better, or a step right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Decisions (pairs of answers, or steps) of about the same confidence."""

    confidence: float
    """Mean probability given to what the model decided, 0.5 to 1."""
    accuracy: float
    """Share of right decisions."""
    count: int


@dataclass(frozen=True)
class Reliability:
    """Bins that hold decisions, the least confident first."""

    bins: list[ReliabilityBin]
    error: float
    """Expected calibration error: mean distance of accuracy and confidence, weighted by the bins' counts."""


def reliability_of(
    logits: Sequence[float], labels: Sequence[float] | None = None, bins: int = BINS
) -> Reliability:
    """Compare confidence with accuracy, in bins of equal width between 0.5 and 1.

    The probability that an answer is better than another is the `sigmoid` of the difference of their scores (Bradley
    and Terry 1952); that of a right step is the `sigmoid` of its score.

    Args:
        logits: score of the chosen answer minus that of the rejected one, of each pair; or the score of each step.
        labels: probability that what the logit is of is true, of each; None: 1.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), equation 3.
    """
    sorted_in: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for logit, label in zip(logits, labels or [1.0] * len(logits), strict=True):
        confidence = 1 / (1 + math.exp(-min(abs(logit), 700.0)))
        right = 0.5 if logit == 0 else label if logit > 0 else 1.0 - label
        place = min(bins - 1, int((confidence - 0.5) * 2 * bins))
        sorted_in[place].append((confidence, right))
    reliability_bins = [
        ReliabilityBin(
            sum(confidence for confidence, _ in decisions) / len(decisions),
            sum(right for _, right in decisions) / len(decisions),
            len(decisions),
        )
        for decisions in sorted_in
        if decisions
    ]
    error = sum(
        abs(reliability_bin.accuracy - reliability_bin.confidence) * reliability_bin.count
        for reliability_bin in reliability_bins
    ) / max(1, len(logits))
    return Reliability(reliability_bins, error)
