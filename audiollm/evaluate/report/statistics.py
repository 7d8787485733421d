"""Scores as tables of plain data: shares with intervals, word errors, confusions, lengths."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

Z = 1.959963984540054
"""The 97.5th percentile of the normal distribution."""

NOTHING = "(nothing)"
"""The last column of a confusion matrix: nothing was recognized, or the clip could not be read."""


def share(correct: Sequence[bool]) -> dict[str, Any]:
    """Share of right answers: `accuracy` with its 95 % Wilson interval `low` to `high`, and `n`; None where n is 0."""
    table = mean_of_shares([float(right) for right in correct])
    return {"accuracy": table.pop("mean"), **table}


def mean_of_shares(values: Sequence[float]) -> dict[str, Any]:
    """The `mean` of values in [0, 1] with its 95 % Wilson interval `low` to `high`, and `n`; None where n is 0.

    For values that are 0 or 1 it is Wilson's interval. For values between (half a point for a tie) it is a wide
    one: no variable in [0, 1] has a larger variance than mean * (1 - mean).
    """
    n = len(values)
    if not n:
        return {"mean": None, "low": None, "high": None, "n": 0}
    mean = sum(values) / n
    middle, spread = mean + Z**2 / (2 * n), Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    low, high = (middle - spread) / (1 + Z**2 / n), (middle + spread) / (1 + Z**2 / n)
    return {"mean": mean, "low": max(0.0, low), "high": min(1.0, high), "n": n}


def mean_of_normal(values: Sequence[float]) -> dict[str, Any]:
    """The `mean` of values with its 95 % interval `low` to `high` by the normal distribution, and `n`.

    The interval is None for fewer than two values, the mean for none.
    """
    n = len(values)
    mean = statistics.fmean(values) if n else None
    if mean is None or n < 2:
        return {"mean": mean, "low": None, "high": None, "n": n}
    spread = Z * statistics.stdev(values) / math.sqrt(n)
    return {"mean": mean, "low": mean - spread, "high": mean + spread, "n": n}


def metric_table(values: Sequence[float | str], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """`mean` (weighted), `median` and `n` of the values that are numbers; the others are reasons, which are counted."""
    numbers = [
        (value, weight)
        for value, weight in zip(values, weights or [1.0] * len(values), strict=True)
        if not isinstance(value, str)
    ]
    reasons = Counter(value for value in values if isinstance(value, str))
    mean = median = None
    if numbers:
        mean = sum(value * weight for value, weight in numbers) / sum(weight for _, weight in numbers)
        median = float(statistics.median(value for value, _ in numbers))
    return {
        "mean": mean,
        "median": median,
        "n": len(numbers),
        "not_available": len(values) - len(numbers),
        "reasons": dict(reasons.most_common()),
    }


def bootstrap_ratio(
    parts: Sequence[float], wholes: Sequence[float], draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """The 95 % percentile interval of sum(parts) / sum(wholes) when the pairs are drawn anew; None for fewer than 2.

    For word errors over words: the pairs are utterances, so that words of one utterance stay together
    (Bisani and Ney, 2004).
    """
    import numpy as np

    n = len(parts)
    if n < 2 or sum(wholes) <= 0:
        return None
    pairs_N2 = np.stack([np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)], axis=1)
    random = np.random.default_rng(seed)
    ratios = []
    for _ in range(draws):
        numerator, denominator = pairs_N2[random.integers(n, size=n)].sum(axis=0)
        if denominator > 0:
            ratios.append(numerator / denominator)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def shares_by(keys: Sequence[Hashable], correct: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """`share` of each group of equal keys, in the order of their names."""
    groups: dict[str, list[bool]] = {}
    for key, right in zip(keys, correct, strict=True):
        groups.setdefault(str(key), []).append(right)
    return {key: share(groups[key]) for key in sorted(groups)}


def confusion(references: Sequence[str], predictions: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Counts with a row per label asked for, a column per label heard, and a last column for nothing."""
    columns = {label: index for index, label in enumerate(labels)}
    counts = [[0] * (len(labels) + 1) for _ in labels]
    for reference, prediction in zip(references, predictions, strict=True):
        counts[columns[reference]][columns.get(prediction, len(labels))] += 1
    return {"asked": list(labels), "heard": [*labels, NOTHING], "counts": counts}


def lengths(durations_s: Sequence[float]) -> dict[str, Any]:
    """Mean, 5th and 95th percentile of durations in seconds."""
    import numpy as np

    if not durations_s:
        return {"mean_s": None, "p5_s": None, "p95_s": None, "n": 0}
    mean, (low, high) = float(np.mean(durations_s)), np.percentile(durations_s, [5, 95])
    return {"mean_s": mean, "p5_s": float(low), "p95_s": float(high), "n": len(durations_s)}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`; None where either is unknown or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator
