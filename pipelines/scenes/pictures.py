"""Pictures of scenes: an object per event hovers over a backdrop, falls, and strikes the ground when it sounds.

A label's look (shape and colour) is the same in every scene. Shapes: H rows, W columns of pixels.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pipelines.scenes.plans import PlannedEvent, ScenePlan

_FINE = 4
"""Pictures are drawn at so many times the size, for smooth edges."""
_FALL_S, _RISE_S = 0.3, 0.5
_HOVER, _GROUND = 0.25, 0.78
"""Heights of an object's middle, from the top, as shares of the side."""
_RADIUS = 0.11
_SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star", "ring")
_GOLDEN = 0.618034


@dataclass(frozen=True)
class Placed:
    """Middle and half size of an object, in pixels."""

    x: float
    y: float
    half_width: float
    half_height: float


def place_at(plan: ScenePlan, event: PlannedEvent, time_s: float, side: int) -> Placed:
    """Return where an object is: it falls before it strikes at its onset, is flat for a moment, and rises."""
    since_s = time_s - event.onset_s
    if -_FALL_S <= since_s < 0:
        fallen = (1 + since_s / _FALL_S) ** 2
    elif 0 <= since_s < _RISE_S:
        fallen = (1 - since_s / _RISE_S) ** 0.5
    else:
        fallen = 0.0
    is_flat = 0 <= since_s < 0.1
    sway = 0.02 * math.sin(2 * math.pi * (0.5 * time_s + 0.3 * event.lane))
    x = (event.lane + 0.5) / len(plan.events) + sway
    y = _HOVER + (_GROUND - _HOVER) * fallen
    radius = _RADIUS if len(plan.events) < 4 else 0.85 * _RADIUS
    width, height = (1.35, 0.65) if is_flat else (1.0, 1.0)
    return Placed(x * side, y * side, radius * width * side, radius * height * side)


def draw_scene(
    plan: ScenePlan, looks: Mapping[str, int], duration_s: float, frame_rate: int, side: int
) -> Iterator[NDArray[np.uint8]]:
    """Draw the pictures `[H, W, 3]` of a scene.

    Args:
        looks: label -> a number, for events and backdrops; it decides shape and colour.
    """
    behind = _backdrop(None if plan.backdrop is None else looks[plan.backdrop.label], side)
    for number in range(round(duration_s * frame_rate)):
        time_s = (number + 0.5) / frame_rate
        picture = Image.fromarray(np.roll(behind, round(6 * time_s), axis=1))
        pen = ImageDraw.Draw(picture)
        for event in plan.events:
            placed = place_at(plan, event, time_s, side * _FINE)
            look = looks[event.sound.label]
            _draw_object(pen, _SHAPES[look % len(_SHAPES)], _pick_colour(look, 0.85, 1.0), placed)
        yield np.asarray(picture.resize((side, side), Image.Resampling.BOX))


# Private


def _pick_colour(look: int, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb((look * _GOLDEN) % 1.0, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _backdrop(look: int | None, side: int) -> NDArray[np.uint8]:
    """Stripes of a backdrop's own colour, width and slope; plain grey where there is none."""
    size = side * _FINE
    picture_HWC = np.full((size, size, 3), 40, np.uint8)
    if look is not None:
        rows, columns = np.mgrid[:size, :size] / size
        phase = (3 + look % 4) * (columns + (look % 3 - 1) * rows)
        stripes = 0.75 + 0.25 * np.sin(2 * np.pi * np.round(phase * 8) / 8)
        picture_HWC = (stripes[:, :, None] * np.array(_pick_colour(look, 0.5, 0.45))).astype(np.uint8)
    ground = round((_GROUND + _RADIUS) * size)
    picture_HWC[ground : ground + max(2, size // 40)] = 200
    return picture_HWC


def _draw_object(pen: ImageDraw.ImageDraw, shape: str, colour: tuple[int, int, int], placed: Placed) -> None:
    x, y, w, h = placed.x, placed.y, placed.half_width, placed.half_height
    box = (x - w, y - h, x + w, y + h)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=round(0.5 * min(w, h)))
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "cross":
        pen.rectangle((x - w, y - h / 3, x + w, y + h / 3), fill=colour)
        pen.rectangle((x - w / 3, y - h, x + w / 3, y + h), fill=colour)
    else:
        corners = {"triangle": 3, "diamond": 4, "star": 10}[shape]
        radii = [1.0, 0.45] if shape == "star" else [1.0]
        angles = [2 * math.pi * n / corners - math.pi / 2 for n in range(corners)]
        points = [
            (x + w * radii[n % len(radii)] * math.cos(a), y + h * radii[n % len(radii)] * math.sin(a))
            for n, a in enumerate(angles)
        ]
        pen.polygon(points, fill=colour)
