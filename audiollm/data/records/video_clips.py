"""Pictures of a clip at a steady rate, as models that see are shown it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from audiollm.data.records.sample import VideoPart
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.files.json_files import read_json_file
from audiollm.video.frames import frame_times, probe_video, read_frames

MAX_PICTURES = 768
"""Most pictures of a clip; Qwen2.5-Omni takes as many."""
PICTURES_FILE = "pictures.json"
"""Beside a model: how it was shown the pictures of videos in its training."""
_KEPT_BYTES = 256 * 2**20


class PictureSettings(BaseModel):
    """How the pictures of videos are shown to a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    per_second: float = Field(2.0, gt=0, le=30)
    """Pictures per second of the clip, each from the middle of its share."""
    side: int | None = Field(None, ge=16, le=2048)
    """Pad to a square and scale to this side, in pixels; null: as they are, and scaled by the model's processor."""

    def save(self, folder: Path) -> None:
        """Write them beside a model."""
        write_json(folder / PICTURES_FILE, self.model_dump())

    @classmethod
    def beside(cls, folder: Path) -> PictureSettings | None:
        """Read those that a model was trained with; None: its folder does not tell.

        Raises:
            ConfigError: the file is broken.
        """
        path = folder / PICTURES_FILE
        if not path.exists():
            return None
        try:
            return cls.model_validate(read_json_file(path, dict))
        except ValidationError as error:
            raise ConfigError(
                f"no settings of pictures: {error.error_count()} errors", str(path), "remove it"
            ) from None


class TimedPictures(NamedTuple):
    """Pictures of a clip in order of time."""

    frames: tuple[NDArray[np.uint8], ...]
    """RGB, each `[H, W, 3]`."""
    times_s: tuple[float, ...]
    """Seconds from the clip's beginning."""


class PictureReader:
    """Reads the pictures of clips, and keeps those of small ones (256 MiB in all), for trainings of many passes."""

    def __init__(self, settings: PictureSettings) -> None:
        self.settings = settings
        self._cache: OrderedDict[str, TimedPictures] = OrderedDict()
        self._bytes = 0

    def read(self, video_part: VideoPart, check_stop: Callable[[], None] | None = None) -> TimedPictures:
        """Read the pictures of a part, cut to its region where it has one.

        Args:
            check_stop: called after every picture; what it raises ends the reading.

        Raises:
            VideoError: it cannot be read, or its region lies outside of the picture.
            ValueError: more than 768 pictures, or a file that does not tell its length.
        """
        key = video_part.model_dump_json()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        pictures = _read_part_pictures(video_part, self.settings, check_stop)
        self._cache[key] = pictures
        self._bytes += _bytes_of(pictures.frames)
        while self._bytes > _KEPT_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._bytes -= _bytes_of(oldest.frames)
        return pictures


# Private


def _read_part_pictures(
    video_part: VideoPart, settings: PictureSettings, check_stop: Callable[[], None] | None
) -> TimedPictures:
    end_s = probe_video(video_part.path).duration_s if video_part.end_s is None else video_part.end_s
    if end_s is None:
        raise ValueError(f"{video_part.path}: its length is not known: give the part an end_s")
    times = frame_times(video_part.start_s, end_s, settings.per_second)
    if len(times) > MAX_PICTURES:
        raise ValueError(f"{video_part.path}: {len(times)} pictures, and at most {MAX_PICTURES} are shown")
    boxes = [(box.at_s, box.x, box.y, box.width, box.height) for box in video_part.region]
    frames = []
    for frame in read_frames(video_part.path, times, settings.side, boxes):
        frames.append(frame)
        if check_stop is not None:
            check_stop()
    if video_part.region and settings.side is None:
        frames = _of_one_size(frames)
    return TimedPictures(tuple(frames), tuple(time - video_part.start_s for time in times))


def _of_one_size(frames: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Pad cuts of a region with black to the largest of them: a video has one size."""
    height, width = (max(frame.shape[axis] for frame in frames) for axis in (0, 1))
    padded = []
    for frame in frames:
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[: frame.shape[0], : frame.shape[1]] = frame
        padded.append(canvas)
    return padded


def _bytes_of(frames: Sequence[NDArray[np.uint8]]) -> int:
    return sum(frame.nbytes for frame in frames)
