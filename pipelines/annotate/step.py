"""The items that steps of the annotation measure, a recording or one segment of it; and the bases of the steps.

Shapes: C channels, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.steps.step import BaseStep, Listener, Settings, Value

if TYPE_CHECKING:
    from audiollm.audio import Waveform


class RecordingMetadata(NamedTuple):
    """Metadata given with a recording."""

    text: str | None = None
    speaker: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class Recording:
    """A file, and what earlier steps found in it.

    Args:
        values: by step, of those that this one needs.
    """

    path: str
    metadata: RecordingMetadata
    values: Mapping[str, Value]
    listener: Listener = field(repr=False, compare=False)

    def blocks(self, sample_rate: int) -> Iterator[NDArray[np.float32]]:
        """The sound as mono pieces `[N]` of any length; hours of it at constant memory."""
        return self.listener.blocks(sample_rate)


@dataclass(frozen=True)
class Segment:
    """A part of a recording, and what earlier steps found in it or in its recording.

    Args:
        kind: speech, or a sound without any.
        speaker: the turn's speaker within the recording; None where nothing tells.
    """

    path: str
    start_s: float
    end_s: float
    kind: Literal["speech", "sound"]
    speaker: str | None
    metadata: RecordingMetadata
    values: Mapping[str, Value]
    listener: Listener = field(repr=False, compare=False)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def waveform(self) -> Waveform:
        """Samples as recorded, `[C, N]`."""
        return self.listener.waveform(self.start_s, self.end_s)

    def samples(self, sample_rate: int) -> NDArray[np.float32]:
        """Mono at `sample_rate`, `[N]`, read-only; decoded and resampled once for all steps."""
        return self.listener.samples(self.start_s, self.end_s, sample_rate)


class SegmentSpan(NamedTuple):
    """Part of a recording that is a segment; see `step.Segment`."""

    start_s: float
    end_s: float
    kind: Literal["speech", "sound"]
    speaker: str | None


class WorkItem(NamedTuple):
    """One item for a worker: where the sound is, the values that the step needs, and a segment's `span`."""

    path: str
    metadata: RecordingMetadata
    span: SegmentSpan | None
    values: Mapping[str, Value]

    def opened(self, listener: Listener) -> Recording | Segment:
        """See `StepItem.opened`."""
        if self.span is None:
            return Recording(self.path, self.metadata, self.values, listener)
        start_s, end_s, kind, speaker = self.span
        return Segment(self.path, start_s, end_s, kind, speaker, self.metadata, self.values, listener)


class RecordingStep(BaseStep[Settings]):
    """A step that measures recordings; `process` takes a `Recording`."""

    level: ClassVar[Literal["recording"]] = "recording"


class SegmentStep(BaseStep[Settings]):
    """A step that measures segments; `process` takes a `Segment`."""

    level: ClassVar[Literal["segment"]] = "segment"
    measures_sounds: ClassVar[bool] = False
    """Whether it runs on segments without speech, too."""
    reads_text: bool = False
    """Whether it is skipped on segments without a trusted text."""
