"""Frames of a video at given times, in constant memory: selected by time, rotated as marked, cut to an object.

FFmpeg decodes in a process of its own (`audiollm.audio.decoding_process`): a file that crashes it costs that file.

Shapes: H rows, W columns of pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiollm.audio.decoding_process import DecoderCrash, contained_results
from audiollm.video.decoders import Box, FramesRequest, VideoError, VideoInfo

__all__ = ["Box", "VideoError", "VideoInfo", "frame_times", "pictures_end_s", "probe_video", "read_frames"]

_DECODERS = "audiollm.video.decoders"


def probe_video(path: str | Path) -> VideoInfo:
    """Read size, length, mean frame rate and rotation, and whether there is sound.

    Raises:
        VideoError: it is no video, or cannot be read.
    """
    request = FramesRequest(str(path), path, (), None, ())
    facts: VideoInfo = next(_run_contained("video_facts", request))
    return facts


def pictures_end_s(path: str | Path) -> float:
    """Return the second at which the last picture ends; the sound of a file may last longer.

    Raises:
        VideoError: it is no video, or is damaged before its end.
    """
    end_s: float = next(_run_contained("pictures_end", FramesRequest(str(path), path, (), None, ())))
    return end_s


def frame_times(start_s: float, end_s: float, per_second: float) -> list[float]:
    """Return the times of frames at a steady rate, each in the middle of its share of the span.

    Raises:
        ValueError: no span, or a rate that is not above 0.
    """
    if not (0 <= start_s < end_s < math.inf and per_second > 0):
        raise ValueError(f"no frames from {start_s} to {end_s} s at {per_second} per second")
    count = max(1, round((end_s - start_s) * per_second))
    return [start_s + (n + 0.5) * (end_s - start_s) / count for n in range(count)]


def read_frames(
    path: str | Path, times_s: Sequence[float], size: int | None = None, boxes: Sequence[Box] = ()
) -> Iterator[NDArray[np.uint8]]:
    """Read the picture `[H, W, 3]`, RGB, that is shown at each of `times_s`, one after the other.

    Args:
        times_s: rising seconds from the beginning, which sound and pictures share.
        size: pad to a square with black and scale to this side.
        boxes: times and places of the part that is kept, in pixels of the shown picture; between two the place moves
            in a line.

    Raises:
        VideoError: it cannot be read, is damaged, ends before the last time, or the place is outside of the picture.
        ValueError: times that do not rise.
    """
    times = tuple(float(time) for time in times_s)
    if any(not b > a for a, b in itertools.pairwise(times)) or (times and times[0] < 0):
        raise ValueError("the times of frames must rise from 0 on")
    if times:
        yield from _run_contained("pictures", FramesRequest(str(path), path, times, size, tuple(boxes)))


# Private


def _run_contained(function: str, request: FramesRequest) -> Iterator[Any]:
    try:
        yield from contained_results(f"{_DECODERS}:{function}", request)
    except DecoderCrash as crash:
        raise VideoError(crash.path, crash.reason) from None
    except ValueError as error:  # whatever else FFmpeg has against the file
        raise VideoError(request.name, f"cannot be decoded ({error}): get it anew") from None
