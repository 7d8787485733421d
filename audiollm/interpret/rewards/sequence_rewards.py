"""Rewards of whole sequences: lagging, quality, and the process reward of partial outputs.

A *segment* is an action that is not silent. Lagging is r_L = -(1/K) sum over K segments of max(0, d_k - l): waiting up
to l chunks costs nothing. d_k is chosen by name:

| name | d_k |
|---|---|
| `run` | silent chunks right before segment k (Seed LiveInterpret 2.0); a constant lag does not change it |
| `lag` | chunks from the end of the source of the reference's segment k to the one where segment k is said |

A sequence without a segment has -max(0, T - l), T its chunks: else silence would have no lag at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from audiollm.interpret.rewards.action_rewards import Similarity
from audiollm.interpret.rewards.stream_actions import ChunkAction, InterpretedStream, RewardTable, StreamBatch

Waiting = Literal["run", "lag"]


def lagging(batch: StreamBatch, allowed: float, waiting: Waiting = "run") -> RewardTable:
    """Return r_L of each stream, `[B]`. `lag` is not defined for a stream whose reference never speaks.

    Args:
        allowed: l, in chunks.

    Raises:
        ValueError: `lag` is asked for, and a stream with segments does not know where its source's segments end.
    """
    return _table_of_streams([stream_lagging(stream, allowed, waiting) for stream in batch.streams])


def stream_lagging(stream: InterpretedStream, allowed: float, waiting: Waiting) -> float | None:
    """Return r_L of one stream; None where it is not defined."""
    if waiting == "lag" and not any(action.speaks for action in stream.reference):
        return None
    waits = waits_of(stream, waiting)
    if not waits:
        return -max(0.0, len(stream.actions) - allowed)
    return -sum(max(0.0, wait - allowed) for wait in waits) / len(waits)


def waits_of(stream: InterpretedStream, waiting: Waiting) -> list[int]:
    """Return d_k of each segment."""
    spoken_chunks = [chunk for chunk, action in enumerate(stream.actions) if action.speaks]
    if waiting == "run":
        return [after - before - 1 for before, after in pairwise([-1, *spoken_chunks])]
    if spoken_chunks and not stream.source_ends:
        raise ValueError("lag needs the chunk in which the source of each segment is over: source_ends")
    ends = list(stream.source_ends)
    # segments beyond those of the reference belong to its last one
    return [chunk - ends[min(place, len(ends) - 1)] for place, chunk in enumerate(spoken_chunks)]


def sequence_quality(batch: StreamBatch, similarity: Similarity) -> RewardTable:
    """Return r_Q of each stream, `[B]`: similarity of everything that is said, from 0 to 1."""
    pairs = [(joined_text(stream.actions), joined_text(stream.reference)) for stream in batch.streams]
    return _table_of_streams(similarity(pairs))


def process_quality(batch: StreamBatch, similarity: Similarity, share: float, every: int) -> RewardTable:
    """Return the process reward at every chunk, `[B, T]` (Hibiki-Zero, arXiv 2602.11072).

    The reward at chunk t is `share` q(y_1...y_t, y*_1...y*_t) + (1 - share) q(y_1...y_T, y*_1...y*_T): the output so
    far against what was due so far, and the whole. It is computed every `every` chunks and after the last one, and
    holds for the chunks up to there. Normalise it in groups, chunk by chunk (`standardized_in_groups`).
    """
    places: list[tuple[int, int]] = []
    pairs: list[tuple[str, str]] = []
    for number, stream in enumerate(batch.streams):
        length = len(stream.actions)
        for end in sorted({*range(every, length, every), length} - {0}):
            places.append((number, end))
            pairs.append((joined_text(stream.actions[:end]), joined_text(stream.reference[:end])))
    scores = dict(zip(places, similarity(pairs), strict=True))
    rows: list[list[float | str]] = []
    for number, stream in enumerate(batch.streams):
        length = len(stream.actions)
        ends = [min(length, (chunk // every + 1) * every) for chunk in range(length)]
        rows.append([_mix_scores(scores[number, end], scores[number, length], share) for end in ends])
    return batch.table(rows)


def joined_text(actions: Sequence[ChunkAction]) -> str:
    """Return the text of actions, one after the other, with single spaces."""
    return " ".join(" ".join(action.text for action in actions if action.text).split())


def _mix_scores(partial: float | str, full: float | str, share: float) -> float | str:
    """Return `share` of the first, and the rest of the second; where one is missing, why."""
    if isinstance(partial, str):
        return partial
    return full if isinstance(full, str) else share * partial + (1 - share) * full


def _table_of_streams(values: Sequence[float | str | None]) -> RewardTable:
    """Return values per stream as a table; None is not defined, a text tells why a value is missing."""
    numbers = [value if isinstance(value, float | int) else None for value in values]
    defined_B = torch.tensor([value is not None for value in numbers], dtype=torch.bool)
    values_B = torch.tensor([value or 0.0 for value in numbers], dtype=torch.float64)
    problems = {number: value for number, value in enumerate(values) if isinstance(value, str)}
    return RewardTable(values_B, defined_B, problems)
