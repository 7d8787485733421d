"""The step `segments`: cuts a recording at pauses and at changes of the speaker.

Shapes: F frames of 32 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from pipelines.annotate.step import Recording, RecordingStep
from pipelines.annotate.steps.voice_activity import unpack
from pipelines.annotate.voice.activity import VoicedSpan, cut
from pipelines.steps.step import StepConfig, Value

_LONG_EDGE_S, _EDGE_MARGIN_S = 0.5, 0.2
_SHORTEST_TURN_S = 0.3
"""Shortest turn of overlapping speech; a shorter one joins the turn before it."""


class SegmentsConfig(StepConfig):
    """Settings of `segments`."""

    max_duration_s: float = Field(30.0, ge=1)
    """Longer speech is cut where the probability of speech is lowest."""
    merge_gap_s: float = Field(0.5, ge=0)
    """Speech of one speaker with a shorter pause stays together."""
    margin_s: float = Field(0.2, ge=0)
    """Seconds around speech that are kept with it."""
    cover: Literal["speech", "all"] = "speech"
    """all: parts without speech become segments, too, of the kind `sound`."""
    min_sound_s: float = Field(1.0, ge=0.1)
    """Shorter stretches without speech are left out."""


class _Piece(NamedTuple):
    """Speech of one speaker, or of several at once (`overlap`)."""

    span: VoicedSpan
    speaker: str | None
    overlap: bool


class Segments(RecordingStep[SegmentsConfig]):
    """The segments of a recording. With a given text the recording is one, without long stretches of non-speech at
    its ends."""

    name = "segments"
    settings = SegmentsConfig
    needs: tuple[str, ...] = ("voice_activity", "speakers")
    version: ClassVar[int] = 2

    def process(self, item: Recording) -> Value:
        """`{segments: [{start_s, end_s, kind, speaker, speech_s, overlap_s, note}, ...]}`, in order of time."""
        activity = item.values["voice_activity"]
        duration_s = activity["duration_s"]
        spans = [VoicedSpan(*span) for span in activity["spans"]]
        if item.metadata.text is not None:
            segment = _make_segment_row(_trim(duration_s, spans), "speech", item.metadata.speaker, spans, 0.0)
            notes = [activity.get("length"), None if spans else "no speech heard in it, kept whole"]
            if any(notes):
                segment["note"] = "; ".join(filter(None, notes))
            return {"segments": [segment]}
        turns = (item.values.get("speakers") or {}).get("turns")
        pieces = _by_turns(spans, turns) if turns else [_Piece(span, None, False) for span in spans]
        rows = self._speech(pieces, activity, spans)
        if self.config.cover == "all":
            rows += self._sounds(rows, duration_s)
        return {"segments": sorted(rows, key=lambda row: (row["start_s"], row["end_s"]))}

    def _speech(self, pieces: Sequence[_Piece], activity: Value, spans: Sequence[VoicedSpan]) -> list[Value]:
        cuts = cut(
            [piece.span for piece in pieces],
            unpack(activity["probabilities"]),
            activity["duration_s"],
            self.config.max_duration_s,
            self.config.merge_gap_s,
            self.config.margin_s,
            labels=[(piece.speaker, piece.overlap) for piece in pieces],
        )
        return [
            _make_segment_row(
                span, "speech", speaker, spans, _inside(span, [p.span for p in pieces if p.overlap])
            )
            for span, label in cuts
            for speaker in [label[0] if label else None]
        ]

    def _sounds(self, rows: Sequence[Value], duration_s: float) -> list[Value]:
        """Cut the sound between the segments of speech into equal parts of at most `max_duration_s`."""
        sounds = []
        edges = [0.0, *(edge for row in rows for edge in (row["start_s"], row["end_s"])), duration_s]
        for start_s, end_s in zip(edges[::2], edges[1::2], strict=True):
            length_s = end_s - start_s
            if length_s < self.config.min_sound_s:
                continue
            count = -int(-length_s // self.config.max_duration_s)
            for index in range(count):
                span = VoicedSpan(
                    start_s + length_s * index / count, start_s + length_s * (index + 1) / count
                )
                sounds.append(_make_segment_row(span, "sound", None, (), 0.0))
        return sounds


def _make_segment_row(
    span: VoicedSpan, kind: str, speaker: str | None, speech: Sequence[VoicedSpan], overlap_s: float
) -> dict[str, Any]:
    return {
        "start_s": round(span.start_s, 6),
        "end_s": round(span.end_s, 6),
        "kind": kind,
        "speaker": speaker,
        "speech_s": round(_inside(span, speech), 6),
        "overlap_s": round(overlap_s, 6),
    }


def _inside(segment_span: VoicedSpan, spans: Sequence[VoicedSpan]) -> float:
    return sum(
        max(min(s.end_s, segment_span.end_s) - max(s.start_s, segment_span.start_s), 0.0) for s in spans
    )


def _trim(duration_s: float, spans: Sequence[VoicedSpan]) -> VoicedSpan:
    """The recording; on a side that is long without speech, only a margin before or after speech is kept."""
    if not spans:
        return VoicedSpan(0.0, duration_s)
    before_s, after_s = spans[0].start_s, duration_s - spans[-1].end_s
    return VoicedSpan(
        before_s - _EDGE_MARGIN_S if before_s > _LONG_EDGE_S else 0.0,
        spans[-1].end_s + _EDGE_MARGIN_S if after_s > _LONG_EDGE_S else duration_s,
    )


def _by_turns(spans: Sequence[VoicedSpan], turns: Sequence[Value]) -> list[_Piece]:
    """Spans of speech cut where the speakers at work change."""
    edges = sorted({turn[edge] for turn in turns for edge in ("start_s", "end_s")})
    pieces: list[_Piece] = []
    for span in spans:
        inside = [span.start_s, *(edge for edge in edges if span.start_s < edge < span.end_s), span.end_s]
        for start_s, end_s in pairwise(inside):
            piece_span, middle_s = VoicedSpan(start_s, end_s), (start_s + end_s) / 2
            active = [turn for turn in turns if turn["start_s"] <= middle_s < turn["end_s"]]
            names = list(dict.fromkeys(turn["speaker"] for turn in active))
            overlap = len(names) > 1 or any(turn["overlap"] for turn in active)
            before = pieces[-1] if pieces and pieces[-1].span.end_s == start_s else None
            if before and (not names or (overlap and end_s - start_s < _SHORTEST_TURN_S)):
                pieces[-1] = before._replace(span=VoicedSpan(before.span.start_s, end_s))
            else:
                pieces.append(_Piece(piece_span, names[0] if names else None, overlap))
    return pieces
