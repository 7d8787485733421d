"""Streams from bilingual data: when each piece of the translation is due, and the sample that says so.

A piece is due after the first chunk in which all source that it needs is over, plus a lag; what would be due after
the last chunk is due there.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from audiollm.data.records.aligned_recording import AlignedRecording, SourceWord, SpokenSpan, target_units
from audiollm.data.records.sample import AudioPart, ContentPart, Message, Sample, TextPart
from audiollm.errors import BadSample

TASK = "interpret"
SLACK_S = 0.05
"""Seconds by which a time may lie beyond the end of its recording: times and lengths are rounded."""

Speak = Callable[[str, str | None, int], SpokenSpan]
"""Says a text in the voice of a speaker of the source; the number tells the texts of a stream apart."""


@dataclass(frozen=True)
class DueText:
    """A piece of the translation, and the time at which the source that it needs is over."""

    text: str
    source_end_s: float
    tag: str = ""
    """Name of a new speaker, written before the text and not said: `[SPEAKER1]`."""
    speaker: str | None = None
    spoken_span: SpokenSpan | None = None
    source_s: float = 0.0
    """Duration of the source that it translates; 0 where it is not known."""
    is_glued: bool = False
    """Whether it follows the piece before without a space."""

    @property
    def tagged_text(self) -> str:
        """The text behind its tag."""
        return f"{self.tag} {self.text}" if self.tag else self.text


@dataclass(frozen=True)
class StreamShape:
    """How recordings become streams."""

    chunk_frames: int
    frame_rate: float
    lag: tuple[int, int] = (0, 0)
    """Least and largest lag in chunks; each stream's is drawn once, from its id and the seed."""
    seed: int = 0
    instruction: str = ""
    """System message of every stream; empty for none."""

    @property
    def chunk_s(self) -> float:
        return self.chunk_frames / self.frame_rate

    def lag_of(self, id: str) -> int:
        """Return the lag of a stream."""
        low, high = self.lag
        digest = hashlib.sha256(f"{self.seed}/{id}".encode()).digest()
        return low + int.from_bytes(digest[:6], "little") % (high - low + 1)


def segments_due(recording: AlignedRecording, speaker_tags: bool = False) -> list[DueText]:
    """Return the translation of each segment, due when the segment is over, or at its `due_s`.

    Args:
        speaker_tags: begin a segment with `[SPEAKER0]`, `[SPEAKER1]`, ... where the speaker is another than before.
    """
    numbers: dict[str, int] = {}
    due: list[DueText] = []
    before: str | None = None
    timed = [
        (segment.end_s if segment.due_s is None else segment.due_s, segment) for segment in recording.segments
    ]
    for time_s, segment in sorted(timed, key=lambda pair: pair[0]):
        text, tag = segment.target.strip(), ""
        if not text:
            continue
        if speaker_tags and segment.speaker is not None and segment.speaker != before:
            tag = f"[SPEAKER{numbers.setdefault(segment.speaker, len(numbers))}]"
            before = segment.speaker
        source_s = segment.end_s - segment.start_s if segment.due_s is None else 0.0
        due.append(DueText(text, time_s, tag, segment.speaker, segment.said, source_s))
    return due


def wait_k_due(recording: AlignedRecording, k: int) -> list[DueText]:
    """Return the units of the translation: unit i is due when word i + k - 1 of the source is over.

    Source: arXiv 1810.08398.

    Raises:
        BadSample: as `units_due`.
    """
    ends = [word.end_s for word in recording.words]
    count = len(target_units(recording.target))
    return units_due(recording, [ends[min(place + k, len(ends)) - 1] for place in range(count)])


def units_due(recording: AlignedRecording, ends_s: Sequence[float]) -> list[DueText]:
    """Return the units of the translation, each due when its source and that of all units before it is over.

    Args:
        ends_s: time of each unit.

    Raises:
        BadSample: another number of times than of units, or of `target_words`.
    """
    units = target_units(recording.target)
    counted = {"units of the translation": len(units), "times": len(ends_s)}
    if recording.target_words:
        counted["target_words"] = len(recording.target_words)
    if len(set(counted.values())) > 1:
        counts = ", ".join(f"{number} {name}" for name, number in counted.items())
        raise BadSample(recording.audio, recording.id, counts, "cannot be aligned")
    spans: list[SpokenSpan | None] = [None] * len(units)
    if recording.target_words and recording.target_audio is not None:
        spans = [
            SpokenSpan(path=recording.target_audio, start_s=word.start_s, end_s=word.end_s)
            for word in recording.target_words
        ]
    return [
        DueText(unit.text, end_s, "", recording.speaker, span, is_glued=unit.is_glued)
        for unit, end_s, span in zip(units, itertools.accumulate(ends_s, max), spans, strict=True)
    ]


def check_recording(recording: AlignedRecording, duration_s: float, wait_k: int | None, place: str) -> None:
    """Check that times rise and lie inside the recording.

    Raises:
        BadSample: what is wrong, by the segment.
    """
    spans: Sequence[SourceWord] = recording.segments if wait_k is None else recording.words
    if not spans or (wait_k is not None and not recording.target.strip()):
        needed = "segments" if wait_k is None else "words" if not spans else "target"
        raise BadSample(place, recording.id, f"has no {needed}: it cannot be aligned", "cannot be aligned")
    check_times(recording, spans, duration_s, place)
    for segment in recording.segments:
        if segment.due_s is not None and segment.due_s > duration_s + SLACK_S:
            reason = f"{segment.target!r} is due at {segment.due_s:g} s, and the recording ends at {duration_s:g} s"
            raise BadSample(place, recording.id, reason, "longer than its recording")


def check_times(
    recording: AlignedRecording, spans: Sequence[SourceWord], duration_s: float, place: str
) -> None:
    """Check that spans have a length, begin one after the other, and end inside their recording.

    Raises:
        BadSample: the first that does not.
    """
    begun = 0.0
    for span in spans:
        if span.end_s <= span.start_s or span.start_s < begun:
            reason = (
                f"{span.text!r}: times out of order ({span.start_s:g} to {span.end_s:g} s, after {begun:g} s)"
            )
            raise BadSample(place, recording.id, reason, "times out of order")
        if span.end_s > duration_s + SLACK_S:
            reason = f"{span.text!r} ends at {span.end_s:g} s, and the recording at {duration_s:g} s"
            raise BadSample(place, recording.id, reason, "longer than its recording")
        begun = span.start_s


def stream_sample(
    recording: AlignedRecording,
    due: Sequence[DueText],
    frames: int,
    shape: StreamShape,
    speak: Speak | None = None,
) -> Sample:
    """Return the stream of a recording.

    Args:
        frames: code frames of the recording.
        speak: says what is not said yet; None: it stays text.
    """
    chunks = -(-frames // shape.chunk_frames)
    lag = shape.lag_of(recording.id)
    pieces: list[list[DueText]] = [[] for _ in range(chunks)]
    over = [0] * chunks
    for piece in due:
        source_end = min(chunks - 1, max(0, math.ceil(piece.source_end_s / shape.chunk_s - 1e-9) - 1))
        at = min(chunks - 1, source_end + lag)
        pieces[at].append(piece)
        over[at] = max(over[at], source_end)
    content: list[ContentPart] = []
    durations_s: list[float] = []
    num_spoken = 0
    for chunk_pieces in pieces:
        content.append(TextPart(text=_join_due_texts(chunk_pieces)))
        spans = _speech_spans(chunk_pieces, speak, num_spoken)
        num_spoken += len(spans)
        content += [AudioPart(path=span.path, start_s=span.start_s, end_s=span.end_s) for span in spans]
        durations_s.append(round(sum(span.end_s - span.start_s for span in spans), 4))
    system = [Message(role="system", content=[TextPart(text=shape.instruction)])] if shape.instruction else []
    metadata: dict[str, Any] = {
        "source_ends": [over[at] for at in range(chunks) if pieces[at]],
        "lag_chunks": lag,
    }
    if any(durations_s):
        metadata["durations_s"] = durations_s
    if any(piece.source_s for piece in due):
        metadata["source_durations_s"] = [
            round(sum(piece.source_s for piece in chunk_pieces), 4) for chunk_pieces in pieces
        ]
    if recording.split is not None:
        metadata["split"] = recording.split
    return Sample(
        id=recording.id,
        messages=[
            *system,
            Message(role="user", content=[AudioPart(path=recording.audio)]),
            Message(role="assistant", content=content, chunk_frames=shape.chunk_frames),
        ],
        task=TASK,
        metadata=metadata,
    )


# Private


def _join_due_texts(pieces: Sequence[DueText]) -> str:
    text = ""
    for piece in pieces:
        text += piece.tagged_text if piece.is_glued or not text else f" {piece.tagged_text}"
    return text


def _speech_spans(pieces: Sequence[DueText], speak: Speak | None, number: int) -> list[SpokenSpan]:
    """Return the speech of an action: spans of one recording in a row are one."""
    spans: list[SpokenSpan] = []
    for (is_said, speaker), group in itertools.groupby(
        pieces, key=lambda piece: (piece.spoken_span is not None, piece.speaker)
    ):
        group_pieces = list(group)
        if not is_said:
            if speak is not None:
                spans.append(
                    speak(
                        _join_due_texts([_without_tag(piece) for piece in group_pieces]),
                        speaker,
                        number + len(spans),
                    )
                )
            continue
        for piece in group_pieces:
            span = piece.spoken_span
            assert span is not None  # by the key of the group
            last = spans[-1] if spans else None
            if last is not None and last.path == span.path and span.start_s >= last.end_s - SLACK_S:
                spans[-1] = last.model_copy(update={"end_s": max(last.end_s, span.end_s)})
            else:
                spans.append(span)
    return spans


def _without_tag(piece: DueText) -> DueText:
    return DueText(piece.text, piece.source_end_s, is_glued=piece.is_glued)
