"""Rewards of single actions: detection, initiative, quality, timing, format.

With y_t the action after chunk t, y*_t the reference's, |y| = 0 silence, T_t the duration of its speech:

| name | value | defined |
|---|---|---|
| detection | 1 where both are silent, else 0 | at every chunk |
| initiative | 1 where both speak, else 0 | at every chunk |
| quality | similarity of y_t and y*_t, in [0, 1] | where both speak |
| timing | min(T_t, T*_t) / max(T_t, T*_t); 1 if both are 0, 0 if one is | at every chunk |
| format | 1 where the whole text of the action matches a pattern, else 0 | at every chunk |

Source: the rewards of Seed LiveInterpret 2.0 (arXiv 2507.17527) as secondary sources tell them; similarity, the form of
timing and all constants are choices of this project (`audiollm/interpret/README.md` has the table).

Shapes: B streams, T chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from audiollm.evaluate.judges.text_scorers import TextScorer, Translation
from audiollm.interpret.rewards.stream_actions import InterpretedStream, RewardTable, StreamBatch

TimingTarget = Literal["reference", "source"]
Similarity = Callable[[Sequence[tuple[str, str]]], list[float | str]]
"""Scores (output, reference) pairs in [0, 1]; in the place of a score that is missing, the reason."""


def similarity_by(scorer: TextScorer, low: float = 0.0, high: float = 100.0) -> Similarity:
    """Return the similarity of a scorer of translations.

    Args:
        low, high: scores that become 0 and 1; scores beyond are clipped.
    """

    def similarity(pairs: Sequence[tuple[str, str]]) -> list[float | str]:
        scores = scorer.score([Translation("", output, reference) for output, reference in pairs])
        return [
            score if isinstance(score, str) else min(1.0, max(0.0, (score - low) / (high - low)))
            for score in scores
        ]

    return similarity


def detection(batch: StreamBatch) -> RewardTable:
    """Return r_l: both are silent."""
    both_BT = ~batch.speaks_BT() & ~batch.reference_speaks_BT()
    return _indicator_table(both_BT, batch)


def initiative(batch: StreamBatch) -> RewardTable:
    """Return r_s: both speak."""
    return _indicator_table(batch.speaks_BT() & batch.reference_speaks_BT(), batch)


def quality(batch: StreamBatch, similarity: Similarity) -> RewardTable:
    """Return r_q: similarity where both speak. It is not defined elsewhere: as 0 it would count initiative twice."""
    places = (batch.speaks_BT() & batch.reference_speaks_BT()).nonzero().tolist()
    streams = batch.streams
    pairs = [(streams[b].actions[t].text, streams[b].reference[t].text) for b, t in places]
    rows: list[list[float | str | None]] = [[None] * len(stream.actions) for stream in streams]
    for (b, t), score in zip(places, similarity(pairs), strict=True):
        rows[b][t] = score
    return batch.table(rows)


def timing(batch: StreamBatch, target: TimingTarget = "reference") -> RewardTable:
    """Return r_c: duration of speech against the reference's, or against that of the source it translates.

    Raises:
        ValueError: `source` is asked for, and a stream does not know its durations.
    """
    return batch.table([_timing_ratios(stream, target) for stream in batch.streams])


def format_match(batch: StreamBatch, pattern: str) -> RewardTable:
    """Return r_f: the whole text of an action matches the pattern; that of silence is empty."""
    compiled = re.compile(pattern, flags=re.DOTALL)
    return batch.table(
        [
            [float(compiled.fullmatch(action.text) is not None) for action in stream.actions]
            for stream in batch.streams
        ]
    )


def duration_ratio(duration: float, target: float) -> float:
    """Return the shorter over the longer duration; 1 if both are 0, 0 if one is."""
    longer = max(duration, target)
    return min(duration, target) / longer if longer > 0 else 1.0


def _timing_ratios(stream: InterpretedStream, target: TimingTarget) -> list[float]:
    target_durations = [action.duration_s for action in stream.reference]
    if target == "source":
        if not stream.source_durations_s:
            raise ValueError("timing against the source needs the durations of the source's segments")
        target_durations = list(stream.source_durations_s)
    return [
        duration_ratio(action.duration_s, goal)
        for action, goal in zip(stream.actions, target_durations, strict=True)
    ]


def _indicator_table(flags_BT: Tensor, batch: StreamBatch) -> RewardTable:
    exists_BT = batch.exists_BT()
    return RewardTable((flags_BT & exists_BT).double(), exists_BT)
