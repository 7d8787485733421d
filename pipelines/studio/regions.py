"""Objects in a video: found around a click, and followed by correlation or by a SAM 2.

The built-in tracker compares colours: it follows an object whose size changes little, for 30 s around the click.

Shapes: H rows, W columns of pixels, h x w a template's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from audiollm.data.records.sample import Region
from audiollm.files.transformers_folders import open_model, opening
from audiollm.video.frames import read_frames
from pipelines.audiocot.steps.tracking import ObjectFinder, PictureBox
from pipelines.studio.limits import StudioRefusal

FRAMES_PER_SECOND = 8.0
AROUND_S = 30.0
"""Seconds before and after the click in which an object is followed."""
_SIDE = 320
"""Longer side of the pictures that are compared."""
_OBJECT_SIDE = 28
"""Longer side of a template: larger objects are compared in smaller pictures."""
_EDGE = 0.12
"""Share of the longer side of an object by which its template is wider on each side."""
_LARGEST_SHARE = 0.3
"""Share of the picture above which what was clicked is the background."""
_FEWEST_PIXELS = 12
_LOST = 0.45
"""Correlation below which the object counts as lost."""


@dataclass(frozen=True)
class PictureClick:
    """A point or a box in the picture that is shown at a time; pixels of the picture as it is shown."""

    at_s: float
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    """0: a click, around which an object is looked for."""


class Sam2Tracker(ObjectFinder):
    """The tracker of an `ObjectFinder` alone: boxes are given by clicks, so no detector is loaded.

    Raises:
        ConfigError: the folder holds no SAM 2.
    """

    def __init__(self, tracker: Path) -> None:
        from transformers import Sam2VideoModel

        self._device = "cpu"
        with opening(tracker, "SAM 2", "give the folder of one for videos", "--tracker"):
            self._tracker = open_model(Sam2VideoModel, tracker)
        self._side = int(self._tracker.config.image_size)


class RegionFinder:
    """Follows what people click in a video.

    Args:
        tracker: None: by correlation.
    """

    def __init__(self, tracker: Sam2Tracker | None = None) -> None:
        self._tracker = tracker
        self._one_at_a_time = threading.Semaphore(1)

    def follow(self, video: Path, duration_s: float, clicks: Sequence[PictureClick]) -> list[Region]:
        """The region of an object through the video, by clicks or boxes on it: between two it is followed from both.

        Raises:
            StudioRefusal: nothing stands out at a click, or it lies outside of the picture.
            VideoError: the video cannot be read.
        """
        with self._one_at_a_time:
            return self._follow(video, duration_s, sorted(clicks, key=lambda click: click.at_s))

    def _follow(self, video: Path, duration_s: float, clicks: Sequence[PictureClick]) -> list[Region]:
        if not clicks:
            raise StudioRefusal("Click the object in the picture, or drag a box around it.")
        start_s = max(0.0, clicks[0].at_s - AROUND_S)
        end_s = min(duration_s, clicks[-1].at_s + AROUND_S)
        steps = np.arange(start_s, max(end_s - 0.02, start_s + 0.01), 1 / FRAMES_PER_SECOND)
        exact = np.array([min(click.at_s, max(0.0, duration_s - 0.05)) for click in clicks])
        times = np.unique(np.round(np.concatenate([steps, exact]), 4))
        pictures, scale = _small_pictures(video, times)
        height, width = pictures[0].shape[:2]
        anchors: dict[int, PictureBox] = {}
        for click, at_s in zip(clicks, np.round(exact, 4), strict=True):
            number = int(np.searchsorted(times, at_s))
            anchors[number] = _clicked_box(pictures[number], click, scale)
        boxes_by_picture = dict(anchors)
        ordered = sorted(anchors)
        for first, stop, step in _stretches(ordered, len(pictures)):
            numbers = range(first, stop, step)
            tracked = self._track([pictures[n] for n in numbers], anchors[first])
            boxes_by_picture.update(
                {n: box for n, box in zip(numbers, tracked, strict=False) if n not in anchors}
            )
        boxes = [
            (float(times[n]), *_grown(boxes_by_picture[n], width, height)) for n in sorted(boxes_by_picture)
        ]
        return [
            Region(
                at_s=at_s,
                x=round(left / scale, 1),
                y=round(top / scale, 1),
                width=round((right - left) / scale, 1),
                height=round((bottom - top) / scale, 1),
            )
            for at_s, left, top, right, bottom in boxes
        ]

    def _track(self, pictures: Sequence[NDArray[np.uint8]], box: PictureBox) -> list[PictureBox]:
        """The object's box in each picture, until it is lost."""
        if self._tracker is not None:
            boxes_by_number = self._tracker.track(pictures, 0, [box])[0]
            boxes: list[PictureBox] = []
            for number in range(len(pictures)):
                if number not in boxes_by_number:
                    break
                boxes.append(boxes_by_number[number])
            return boxes
        return correlated_boxes(pictures, box)


def correlated_boxes(pictures: Sequence[NDArray[np.uint8]], box: PictureBox) -> list[PictureBox]:
    """Follow a box by normalized correlation of colours with where it was, until it is lost."""
    longest = max(box[2] - box[0], box[3] - box[1])
    scale = min(1.0, _OBJECT_SIDE / longest)
    opening_HWC = _resized(pictures[0], scale)
    # with an edge of what is around it: an object of one colour has nothing else to be known by
    edge = max(2.0, _EDGE * longest * scale)
    left, top = max(0, round(box[0] * scale - edge)), max(0, round(box[1] * scale - edge))
    width = min(opening_HWC.shape[1], max(left + 4, round(box[2] * scale + edge))) - left
    height = min(opening_HWC.shape[0], max(top + 4, round(box[3] * scale + edge))) - top
    begun_x, begun_y = left, top
    first_hwC = opening_HWC[top : top + height, left : left + width]
    latest_hwC, boxes = first_hwC, [box]
    moved_x, moved_y = 0, 0
    for picture in (_resized(frame, scale) for frame in pictures[1:]):
        reach = max(8, round(1.2 * max(width, height)))
        x0, y0 = max(0, left + moved_x - reach), max(0, top + moved_y - reach)
        x1, y1 = left + moved_x + width + reach, top + moved_y + height + reach
        area = picture[y0:y1, x0:x1]
        if area.shape[0] < height or area.shape[1] < width:
            break
        scores = 0.5 * (correlation(area, first_hwC) + correlation(area, latest_hwC))
        y, x = np.unravel_index(int(scores.argmax()), scores.shape)
        if scores[y, x] < _LOST:
            break
        new_left, new_top = x0 + int(x), y0 + int(y)
        moved_x, moved_y, left, top = new_left - left, new_top - top, new_left, new_top
        latest_hwC = 0.8 * latest_hwC + 0.2 * picture[top : top + height, left : left + width]
        x, y = (left - begun_x) / scale, (top - begun_y) / scale
        boxes.append((box[0] + x, box[1] + y, box[2] + x, box[3] + y))
    return boxes


def correlation(area_HWC: NDArray[Any], template_hwC: NDArray[Any]) -> NDArray[np.float64]:
    """Correlation, from -1 to 1, of a template with every place of an area."""
    from scipy.ndimage import uniform_filter
    from scipy.signal import fftconvolve

    height, width = template_hwC.shape[:2]
    centred_hwC = template_hwC - template_hwC.mean(axis=(0, 1))
    norm = np.sqrt((centred_hwC**2).sum()) + 1e-6
    products_YX = fftconvolve(area_HWC, centred_hwC[::-1, ::-1], mode="valid", axes=(0, 1)).sum(axis=2)

    def mean_YXC(values_HWC: NDArray[Any]) -> NDArray[Any]:
        blurred = uniform_filter(values_HWC, (height, width, 1), origin=(-(height // 2), -(width // 2), 0))
        return blurred[: values_HWC.shape[0] - height + 1, : values_HWC.shape[1] - width + 1]

    variance_YXC = mean_YXC(area_HWC**2) - mean_YXC(area_HWC) ** 2
    power_YX = np.maximum(variance_YXC.sum(axis=2) * height * width, 0.0)
    # below a grey level of deviation there is nothing to compare
    found_YX: NDArray[np.float64] = products_YX / (norm * np.sqrt(np.maximum(power_YX, height * width)))
    return found_YX


# Private


def _small_pictures(video: Path, times: NDArray[np.float64]) -> tuple[list[NDArray[np.uint8]], float]:
    """Pictures at the times, scaled down, and by how much."""
    pictures: list[NDArray[np.uint8]] = []
    scale = 1.0
    for picture in read_frames(video, times.tolist()):
        scale = min(1.0, _SIDE / max(picture.shape[:2]))
        pictures.append(_resized(picture, scale).astype(np.uint8))
    return pictures, scale


def _resized(picture_HWC: NDArray[np.uint8], scale: float) -> NDArray[np.float64]:
    if scale < 1.0:
        height, width = picture_HWC.shape[:2]
        size = (max(8, round(width * scale)), max(8, round(height * scale)))
        picture_HWC = np.asarray(Image.fromarray(picture_HWC).resize(size, Image.Resampling.BOX))
    return picture_HWC.astype(np.float64)


def _stretches(anchors: Sequence[int], count: int) -> list[tuple[int, int, int]]:
    """Runs of pictures (first, stop, step), each of which begins at an anchor."""
    stretches = [(anchors[0], -1, -1), (anchors[-1], count, 1)]
    for early, late in itertools.pairwise(anchors):
        middle = (early + late) // 2
        stretches += [(early, middle + 1, 1), (late, middle, -1)]
    return stretches


def _clicked_box(picture: NDArray[np.uint8], click: PictureClick, scale: float) -> PictureBox:
    """The box of a click in a small picture.

    Raises:
        StudioRefusal: it lies outside, or nothing stands out there.
    """
    height, width = picture.shape[:2]
    x, y = click.x * scale, click.y * scale
    if not (0 <= x < width and 0 <= y < height):
        raise StudioRefusal("The click lies outside of the picture: click the object in it.")
    if click.width and click.height:
        right, bottom = min(width, x + click.width * scale), min(height, y + click.height * scale)
        if right - x < 2 or bottom - y < 2:
            raise StudioRefusal("The box is too small: drag it around the whole object.")
        return (x, y, right, bottom)
    return _object_around(picture.astype(np.float64), int(x), int(y))


def _object_around(picture_HWC: NDArray[np.float64], x: int, y: int) -> PictureBox:
    """The box around pixels of like colour that hang together with the clicked one.

    Raises:
        StudioRefusal: they are nearly nothing, or a large part of the picture.
    """
    from scipy.ndimage import binary_closing, label, uniform_filter

    smooth = uniform_filter(picture_HWC, size=(3, 3, 1))
    colour = np.median(smooth[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2], axis=(0, 1))
    distance = np.sqrt(((smooth - colour) ** 2).sum(axis=2))
    for tolerance in (90.0, 70.0, 50.0, 35.0, 25.0):
        near = binary_closing(distance < tolerance, iterations=1) | (distance < tolerance)
        pieces, _ = label(near)
        inside = pieces == pieces[y, x]
        if _FEWEST_PIXELS <= inside.sum() <= _LARGEST_SHARE * inside.size:
            rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
            box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
            if (box[2] - box[0]) * (box[3] - box[1]) <= 2 * _LARGEST_SHARE * inside.size:
                return box
    raise StudioRefusal(
        "Nothing stands out at this point: click the middle of an object, or drag a box around it."
    )


def _grown(box: PictureBox, width: int, height: int) -> PictureBox:
    """A box with a margin of 5 %, inside the picture."""
    across, down = 0.05 * (box[2] - box[0]), 0.05 * (box[3] - box[1])
    left, top = max(0.0, box[0] - across), max(0.0, box[1] - down)
    return (left, top, max(left + 1, min(width, box[2] + across)), max(top + 1, min(height, box[3] + down)))
