"""Scores as tables of plain data: shares with intervals, word errors, confusions, lengths."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

NOTHING = "(nothing)"
"""The last column of a confusion matrix: nothing was heard, or there was nothing to hear."""


def share(correct: Sequence[bool]) -> dict[str, Any]:
    """How many are right: `accuracy` with its 95 % Wilson interval `low` to `high`, of `n`; None of none."""
    from scipy.stats import binomtest

    if not correct:
        return {"accuracy": None, "low": None, "high": None, "n": 0}
    test = binomtest(sum(correct), len(correct))
    interval = test.proportion_ci(confidence_level=0.95, method="wilson")
    return {"accuracy": test.statistic, "low": interval.low, "high": interval.high, "n": len(correct)}


def shares_by(keys: Sequence[Hashable], correct: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """`share` of each group of equal keys, in the order of their names."""
    groups: dict[str, list[bool]] = {}
    for key, right in zip(keys, correct, strict=True):
        groups.setdefault(str(key), []).append(right)
    return {key: share(groups[key]) for key in sorted(groups)}


def word_error_rate(asked: Sequence[str], heard: Sequence[str]) -> float | None:
    """Word errors over all words asked for (jiwer), texts without a word left out; None of none."""
    from jiwer import wer

    pairs = [(reference, hypothesis) for reference, hypothesis in zip(asked, heard, strict=True) if reference]
    return float(wer([pair[0] for pair in pairs], [pair[1] for pair in pairs])) if pairs else None


def confusion(asked: Sequence[str], heard: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Counts: a row for each label asked for, a column for each heard and a last one for nothing."""
    columns = {label: index for index, label in enumerate(labels)}
    counts = [[0] * (len(labels) + 1) for _ in labels]
    for wanted, got in zip(asked, heard, strict=True):
        counts[columns[wanted]][columns.get(got, len(labels))] += 1
    return {"asked": list(labels), "heard": [*labels, NOTHING], "counts": counts}


def lengths(durations_s: Sequence[float]) -> dict[str, Any]:
    """Mean, 5th and 95th percentile of durations in seconds."""
    import numpy as np

    if not durations_s:
        return {"mean_s": None, "p5_s": None, "p95_s": None, "n": 0}
    mean, (low, high) = float(np.mean(durations_s)), np.percentile(durations_s, [5, 95])
    return {"mean_s": mean, "p5_s": float(low), "p95_s": float(high), "n": len(durations_s)}


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None where either is unknown or the whole is 0."""
    return None if part is None or not whole else part / whole
