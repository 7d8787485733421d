"""Items of the annotation for workers: a recording, or a segment of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pipelines.annotate.step import Recording, RecordingMetadata, Segment
from pipelines.steps.step import Listener, Value


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
