"""The items that steps of AudioCoT measure, a file with sound or one clip of it; and the bases of the steps.

Shapes: C channels, N samples, H rows, W columns of pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.data.records.sample import Region
from pipelines.steps.step import BaseStep, Listener, Settings, Value

if TYPE_CHECKING:
    from audiollm.audio import Waveform


class FileFacts(NamedTuple):
    """Facts given with a file. `truth` is that of `compose_scenes`: its metadata, with absolute paths."""

    text: str | None = None
    video: str | None = None
    """The file of its pictures, where that is another one."""
    video_digest: str | None = None
    truth: Mapping[str, Any] | None = None
    split: str | None = None

    def pictures_of(self, path: str, probe: Value) -> str | None:
        """The file of the pictures of the file at `path`; None: there are none.

        Args:
            probe: the value of that step.
        """
        return (self.video or path) if probe["has_pictures"] else None


class ClipSpan(NamedTuple):
    """Part of a file that is a clip."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class SoundFile:
    """A file, and what earlier steps found in it."""

    path: str
    facts: FileFacts
    values: Mapping[str, Value]
    listener: Listener = field(repr=False, compare=False)


@dataclass(frozen=True)
class SoundClip:
    """A clip of a file, and what earlier steps found in it or in its file."""

    path: str
    start_s: float
    end_s: float
    facts: FileFacts
    values: Mapping[str, Value]
    listener: Listener = field(repr=False, compare=False)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def video(self) -> str | None:
        """The file of the clip's pictures; None: there are none."""
        return self.facts.pictures_of(self.path, self.values["probe"])

    def waveform(self) -> Waveform:
        """Samples as recorded, `[C, N]`."""
        return self.listener.waveform(self.start_s, self.end_s)

    def samples(self, sample_rate: int) -> NDArray[np.float32]:
        """Mono at `sample_rate`, `[N]`, read-only; decoded and resampled once for all steps."""
        return self.listener.samples(self.start_s, self.end_s, sample_rate)

    def pictures(
        self, frame_rate: float, side: int | None, region: Sequence[Region] = ()
    ) -> Iterator[tuple[float, NDArray[np.uint8]]]:
        """Times from the clip's start, and pictures `[H, W, 3]`, of a clip with a video.

        Args:
            side: pad to a square and scale to this side; None: as they are.
            region: cut to an object, whose times are those of the file.
        """
        from audiollm.video.frames import frame_times, read_frames

        assert self.video is not None
        times = frame_times(self.start_s, self.end_s, frame_rate)
        boxes = [(box.at_s, box.x, box.y, box.width, box.height) for box in region]
        for time_s, picture_HWC in zip(times, read_frames(self.video, times, side, boxes), strict=True):
            yield time_s - self.start_s, picture_HWC


class ClipItem(NamedTuple):
    """One item for a worker: a file, or with a span a clip of it."""

    path: str
    facts: FileFacts
    span: ClipSpan | None
    values: Mapping[str, Value]

    def opened(self, listener: Listener) -> SoundFile | SoundClip:
        """See `StepItem.opened`."""
        if self.span is None:
            return SoundFile(self.path, self.facts, self.values, listener)
        return SoundClip(self.path, *self.span, self.facts, self.values, listener)


class FileStep(BaseStep[Settings]):
    """A step that measures files; `process` takes a `SoundFile`."""

    level: ClassVar[Literal["file"]] = "file"


class ClipStep(BaseStep[Settings]):
    """A step that measures clips; `process` takes a `SoundClip`."""

    level: ClassVar[Literal["clip"]] = "clip"
