"""Decoding of pictures by FFmpeg; it runs in the process that a crash may cost, and imports no torch.

Shapes: H rows, W columns of pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from audiollm.audio.discovery import AudioError
from audiollm.files.spelled_paths import as_spelled

NO_OTHER_FILES = {"protocol_whitelist": "none"}
"""Options of FFmpeg: a playlist that is called a video must not reach other files or the network."""
_PREROLL_S = 0.5
_LATE_S = 0.25
"""A last frame is shown for so long at most, where its duration is not known."""

Box = tuple[float, float, float, float, float]
"""Time, left, top, width, height; seconds and pixels."""


class VideoError(AudioError):
    """A video that cannot be read or written: `path`, and in `reason` what to do."""


@dataclass(frozen=True)
class VideoInfo:
    """Facts of a video; the picture is as it is shown, rotated as the file says."""

    width: int
    height: int
    duration_s: float | None
    frame_rate: float | None
    """Mean frames per second."""
    rotation: int
    """Degrees counter-clockwise by which stored pictures are rotated to be shown: 0, 90, 180 or 270."""
    has_audio: bool


@dataclass(frozen=True)
class FramesRequest:
    """Pictures of `source` at rising times, called `name` in errors."""

    source: str
    name: str | Path
    times_s: tuple[float, ...]
    size: int | None
    """Side of the square that pictures are padded and scaled to; None: as they are."""
    boxes: tuple[Box, ...]
    """Places of the part that is kept, over time; none: all of the picture."""


def video_facts(request: FramesRequest) -> Iterator[VideoInfo]:
    """Read header and first picture.

    Raises:
        VideoError: it cannot be read.
    """
    with _open_pictures(request) as (container, stream, _):
        first = next(_frames(container, stream, request), None)
        if first is None:
            raise VideoError(
                request.name, "holds no picture that can be decoded: empty or cut off, get it anew"
            )
        quarter_turns = _quarter_turns(first)
        width, height = (first.width, first.height)[:: -1 if quarter_turns % 2 else 1]
        seconds = None if stream.duration is None else float(stream.duration * stream.time_base)
        if seconds is None and container.duration is not None:
            seconds = container.duration / 1e6
        rate = None if stream.average_rate is None else float(stream.average_rate)
        yield VideoInfo(width, height, seconds, rate, quarter_turns * 90, bool(container.streams.audio))


def pictures_end(request: FramesRequest, may_seek: bool = True) -> Iterator[float]:
    """Give the second at which the last picture ends; sound may last longer.

    Raises:
        VideoError: it cannot be read, or is damaged before its end.
    """
    with _open_pictures(request) as (container, stream, origin_s):
        length_s = (container.duration or 0) / av.time_base
        has_sought = may_seek and length_s > 2 * _PREROLL_S
        if has_sought:
            container.seek(int((origin_s + length_s - _PREROLL_S) * av.time_base))
        end_s = None
        for frame in _frames(container, stream, request):
            end_s = (frame.time or 0.0) - origin_s + (_length_s(frame) or 0.0)
        if end_s is None and has_sought:
            yield from pictures_end(request, may_seek=False)
        elif end_s is None:
            raise VideoError(
                request.name, "holds no picture that can be decoded: empty or cut off, get it anew"
            )
        else:
            yield end_s


def pictures(request: FramesRequest, may_seek: bool = True) -> Iterator[NDArray[np.uint8]]:
    """Give the picture `[H, W, 3]` that is shown at each time: the last frame that begins by then.

    Raises:
        VideoError: it cannot be read, is damaged, or ends before the last time.
    """
    with _open_pictures(request) as (container, stream, origin_s):
        remaining_s = list(request.times_s)
        has_sought = may_seek and remaining_s[0] > 2 * _PREROLL_S
        if has_sought:
            container.seek(int((origin_s + remaining_s[0] - _PREROLL_S) * av.time_base))
        current, current_s, step_s, last_s = None, 0.0, 0.0, _LATE_S
        for frame in _frames(container, stream, request):
            begins_s = (frame.time or 0.0) - origin_s
            if current is None and has_sought and begins_s > remaining_s[0]:
                yield from pictures(request, may_seek=False)
                return
            while remaining_s and current is not None and begins_s > remaining_s[0] + 1e-6:
                yield _convert_picture(current, remaining_s.pop(0), request)
            if not remaining_s:
                return
            step_s = begins_s - current_s if current is not None else 0.0
            current, current_s = frame, begins_s
            last_s = _length_s(frame) or _LATE_S
        if current is None:
            raise VideoError(
                request.name, "holds no picture that can be decoded: empty or cut off, get it anew"
            )
        end_s = current_s + max(step_s, last_s, _LATE_S)
        for time_s in remaining_s:
            if time_s > end_s:
                raise VideoError(request.name, f"ends at {end_s:.2f} s, and {time_s:.2f} s is asked for")
            yield _convert_picture(current, time_s, request)


def shown_stream(container: Any, name: str | Path) -> Any:
    """The first stream of pictures that is no cover.

    Raises:
        VideoError: there is none.
    """
    streams = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not streams:
        raise VideoError(name, "has no pictures: give a video, or use its sound alone")
    return streams[0]


# Private


@contextlib.contextmanager
def _open_pictures(request: FramesRequest) -> Iterator[tuple[Any, Any, float]]:
    """The container, its pictures, and the second that time is counted from, which sound and pictures share."""
    with contextlib.ExitStack() as stack:
        try:
            binary = stack.enter_context(open(as_spelled(Path(request.source)), "rb"))
            container = stack.enter_context(av.open(binary, "r", options=NO_OTHER_FILES))
        except (av.error.FFmpegError, OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "does not exist" if missing else f"cannot be opened ({error}): get it anew"
            raise VideoError(request.name, reason) from None
        stream = shown_stream(container, request.name)
        stream.thread_type = "NONE"
        yield container, stream, (container.start_time or 0) / av.time_base


def _frames(container: Any, stream: Any, request: FramesRequest) -> Iterator[Any]:
    last_s = 0.0
    try:
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise VideoError(request.name, f"is damaged after {last_s:.2f} s: get it anew")
            last_s = frame.time or last_s
            yield frame
    except av.error.FFmpegError as error:
        raise VideoError(request.name, f"is damaged after {last_s:.2f} s ({error}): get it anew") from None


def _length_s(frame: Any) -> float | None:
    """Seconds for which a frame is shown; None: its file does not tell."""
    return float(frame.duration * frame.time_base) if frame.duration and frame.time_base else None


def _quarter_turns(frame: Any) -> int:
    return round(frame.rotation / 90) % 4


def _convert_picture(frame: Any, time_s: float, request: FramesRequest) -> NDArray[np.uint8]:
    shown_HWC = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
    if request.boxes:
        shown_HWC = _crop_region(shown_HWC, _box_at(request.boxes, time_s), request)
    if request.size is not None:
        shown_HWC = _pad_to_square(shown_HWC, request.size)
    return np.ascontiguousarray(shown_HWC)


def _box_at(boxes: tuple[Box, ...], time_s: float) -> NDArray[np.float64]:
    places = np.array(boxes)
    return np.array([np.interp(time_s, places[:, 0], places[:, column]) for column in range(1, 5)])


def _crop_region(
    shown_HWC: NDArray[np.uint8], box: NDArray[np.float64], request: FramesRequest
) -> NDArray[np.uint8]:
    height, width = shown_HWC.shape[:2]
    left, top = (max(0, round(value)) for value in box[:2])
    right, bottom = min(width, round(box[0] + box[2])), min(height, round(box[1] + box[3]))
    if right <= left or bottom <= top:
        place = f"x {box[0]:.0f}, y {box[1]:.0f}, {box[2]:.0f} x {box[3]:.0f}"
        raise VideoError(
            request.name, f"the region ({place}) lies outside of the picture of {width} x {height}"
        )
    return shown_HWC[top:bottom, left:right]


def _pad_to_square(shown_HWC: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Pad to a square in the middle of black, and scale."""
    height, width = shown_HWC.shape[:2]
    side = max(height, width)
    square_HWC = np.zeros((side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square_HWC[top : top + height, left : left + width] = shown_HWC
    return np.asarray(Image.fromarray(square_HWC).resize((size, size), Image.Resampling.BICUBIC))
