"""Is a reward model's confidence right? Reliability of the probability that one answer is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs of about the same confidence."""

    confidence: float
    """Mean probability given to the answer that the model prefers, 0.5 to 1."""
    accuracy: float
    """Share of the pairs where that answer is the chosen one."""
    count: int


@dataclass(frozen=True)
class Reliability:
    """Bins that hold pairs, the least confident first."""

    bins: list[ReliabilityBin]
    error: float
    """Expected calibration error: mean distance of accuracy and confidence, weighted by the bins' pairs."""


def reliability_of(margins: Sequence[float], bins: int = BINS) -> Reliability:
    """Compare confidence with accuracy, in bins of equal width between 0.5 and 1.

    The probability that the first answer is better is `sigmoid(margin)` (Bradley and Terry 1952).

    Args:
        margins: score of the chosen answer minus that of the rejected one, of each pair.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), equation 3.
    """
    sorted_in: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 700.0)))
        right = 0.5 if margin == 0 else float(margin > 0)
        place = min(bins - 1, int((confidence - 0.5) * 2 * bins))
        sorted_in[place].append((confidence, right))
    made = [
        ReliabilityBin(
            sum(confidence for confidence, _ in each) / len(each),
            sum(right for _, right in each) / len(each),
            len(each),
        )
        for each in sorted_in
        if each
    ]
    error = sum(abs(each.accuracy - each.confidence) * each.count for each in made) / max(1, len(margins))
    return Reliability(made, error)
