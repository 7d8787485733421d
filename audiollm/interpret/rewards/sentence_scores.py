"""Average lagging of streams, and quality and latency of their sentences: what `seqpo` and `gated` are made of.

Shapes: B streams, S sentences (segments of the reference) of the stream with the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from audiollm.evaluate.interpret.latency import (
    EmissionTimes,
    average_lagging,
    length_adaptive_average_lagging,
)
from audiollm.evaluate.interpret.logged_outputs import Unit, join_units, split_units
from audiollm.evaluate.interpret.resegment import ReferenceSegment, resegment
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.interpret.rewards.action_rewards import Similarity
from audiollm.interpret.rewards.stream_actions import InterpretedStream, RewardTable, StreamBatch

LATENCY_BY_NAME = {"AL": average_lagging, "LAAL": length_adaptive_average_lagging}


def lagging_latency(
    batch: StreamBatch, name: Literal["AL", "LAAL"], chunk_s: Sequence[float], unit: Unit = "word"
) -> RewardTable:
    """Return the average lagging of each stream in seconds, `[B]`.

    A stream without a word is scored as its reference, all said at the end.

    Args:
        chunk_s: duration of a chunk of each stream.
        unit: `word`, or `character` for languages without spaces.
    """
    values = []
    for stream, size_s in zip(batch.streams, chunk_s, strict=True):
        spoken_units, times = _timed_units(stream, size_s, unit)
        length_s = len(stream.actions) * size_s
        units = max(1, sum(len(split_units(action.text, unit)) for action in stream.reference))
        if spoken_units:
            emissions = EmissionTimes(tuple(times), length_s, units)
        else:
            emissions = EmissionTimes.at_the_end(length_s, units)
        values.append(LATENCY_BY_NAME[name](emissions))
    return RewardTable(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))


@dataclass(frozen=True)
class SentenceScores:
    """Quality and latency of the sentences of streams."""

    quality_BS: Tensor
    latency_BS: Tensor
    """LAAL in seconds."""
    defined_BS: Tensor
    """bool: sentences that there are, and that have a quality."""
    problems: Mapping[int, str]
    """Why a quality is missing, by number of the stream."""


def sentence_scores(
    batch: StreamBatch,
    similarity: Similarity,
    chunk_s: Sequence[float],
    worst_s: float,
    unit: Unit = "word",
) -> SentenceScores:
    """Return quality and latency of the sentences of each stream.

    A sentence is a segment of the reference. It begins where the source of the segment before is over, and ends where
    its own is; the output is divided among the sentences by the fewest edits between units.

    Args:
        worst_s: latency of a sentence for which nothing is said.
        unit: `word`, or `character` for languages without spaces.
    """
    max_sentences = max(
        (sum(action.speaks for action in stream.reference) for stream in batch.streams), default=0
    )
    quality_BS = torch.zeros(len(batch.streams), max_sentences, dtype=torch.float64)
    latency_BS, defined_BS = torch.zeros_like(quality_BS), torch.zeros_like(quality_BS, dtype=torch.bool)
    pairs: list[tuple[str, str]] = []
    places: list[tuple[int, int]] = []
    for number, (stream, size_s) in enumerate(zip(batch.streams, chunk_s, strict=True)):
        spoken_units, times = _timed_units(stream, size_s, unit)
        length_s = len(stream.actions) * size_s
        for place, sentence in enumerate(
            resegment(spoken_units, times, _reference_sentences(stream, size_s, unit))
        ):
            places.append((number, place))
            pairs.append((join_units(sentence.units, unit), join_units(sentence.segment.units, unit)))
            try:
                emissions = sentence.emissions(length_s)
                latency_BS[number, place] = length_adaptive_average_lagging(emissions)
            except MetricError:
                latency_BS[number, place] = worst_s
    problems: dict[int, str] = {}
    for (number, place), score in zip(places, similarity(pairs), strict=True):
        if isinstance(score, str):
            problems.setdefault(number, score)
        else:
            quality_BS[number, place], defined_BS[number, place] = score, True
    return SentenceScores(quality_BS, latency_BS, defined_BS, problems)


def _timed_units(stream: InterpretedStream, chunk_s: float, unit: Unit) -> tuple[list[str], list[float]]:
    """The words or characters of a stream, and the end of the chunk after which each is said."""
    timed = [
        (spoken_unit, (chunk + 1) * chunk_s)
        for chunk, action in enumerate(stream.actions)
        for spoken_unit in split_units(action.text, unit)
    ]
    return [spoken_unit for spoken_unit, _ in timed], [time for _, time in timed]


def _reference_sentences(stream: InterpretedStream, chunk_s: float, unit: Unit) -> list[ReferenceSegment]:
    """The segments of the reference with the spans of their sources; the last one may end with the stream."""
    texts = [action.text for action in stream.reference if action.speaks]
    spoken_chunks = [chunk for chunk, action in enumerate(stream.reference) if action.speaks]
    ends = list(stream.source_ends) if len(stream.source_ends) == len(spoken_chunks) else spoken_chunks
    segments, begin_s = [], 0.0
    for text, end in zip(texts, ends, strict=True):
        end_s = max((end + 1) * chunk_s, begin_s + chunk_s)
        segments.append(ReferenceSegment(begin_s, end_s, tuple(split_units(text, unit))))
        begin_s = end_s
    return segments
