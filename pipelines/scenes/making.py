"""A planned scene is made: solo tracks, their sum, pictures, and the record of all of it.

Tracks are rounded to 16 bits before they are added, so that the mixture is the sum of its tracks sample for sample.

An object per event hovers over a backdrop, falls, and strikes the ground when it sounds. A label's look (shape and
colour) is the same in every scene.

Shapes: C channels, N samples, H rows, W columns of pixels.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.data.records.sample import AudioPart, Message, Region, Sample, TextPart, VideoPart
from audiollm.video.frames import frame_times
from audiollm.video.writing import write_video
from pipelines.scenes.plans import PlannedEvent, ScenePlan, caption_of, thought_of
from pipelines.scenes.settings import ComposeScenesConfig
from pipelines.scenes.sounds import load_backdrop, load_event

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


TASK = "sound"
_PEAK = 0.98
_REGIONS_PER_S = 8.0


def make_scene(
    plan: ScenePlan, config: ComposeScenesConfig, looks: Mapping[str, int], folder: Path
) -> Sample:
    """Write the files of a scene below `folder`, in a folder named by its id; paths of the record are relative to it.

    Raises:
        AudioError: a recording cannot be read, or is silent.
    """
    scene = folder / plan.id
    scene.mkdir(parents=True, exist_ok=True)
    tracks, ends_s = _mix_tracks(plan, config)
    for name, track_CN in tracks.items():
        _save_track(scene / f"{name}.flac", track_CN, config.sample_rate)
    mixture_CN: NDArray[np.int32] = np.stack(list(tracks.values())).sum(axis=0, dtype=np.int32)
    _save_track(scene / "mixture.flac", mixture_CN, config.sample_rate)
    sound = Waveform(torch.from_numpy((mixture_CN / 32768).astype(np.float32)), config.sample_rate)
    frames = draw_scene(plan, looks, config.duration_s, config.frame_rate, config.side)
    write_video(scene / "video.mp4", frames, config.frame_rate, sound)
    return _build_scene_sample(plan, config, ends_s)


# Private


def _mix_tracks(
    plan: ScenePlan, config: ComposeScenesConfig
) -> tuple[dict[str, NDArray[np.int32]], list[float]]:
    """Tracks `[C, N]` by name, in 16-bit units, and the second at which each event ends."""
    samples = round(config.duration_s * config.sample_rate)
    tracks_CN: dict[str, NDArray[np.float32]] = {}
    ends_s = []
    for number, event in enumerate(plan.events):
        part_N = load_event(event.sound.path, config.sample_rate, config.event_s)
        start = round(event.onset_s * config.sample_rate)
        part_N = part_N[: samples - start] * _gain(config.event_dbfs + event.gain_db)
        track_N = np.zeros(samples, np.float32)
        track_N[start : start + len(part_N)] = part_N
        tracks_CN[f"event-{number}"] = _panned(track_N, plan, event, config.channels)
        ends_s.append(round((start + len(part_N)) / config.sample_rate, 3))
    if plan.backdrop is not None:
        draw = np.random.default_rng(plan.seed)
        part_N = load_backdrop(plan.backdrop.path, config.sample_rate, samples, draw)
        level_N = part_N * _gain(config.backdrop_dbfs)
        tracks_CN["backdrop"] = np.tile(level_N, (config.channels, 1))
    peak = float(np.abs(sum(tracks_CN.values())).max())
    scale = min(
        1.0, _PEAK / max(peak, 1e-9), *(_PEAK / max(float(np.abs(t).max()), 1e-9) for t in tracks_CN.values())
    )
    return {name: np.round(t * scale * 32767).astype(np.int32) for name, t in tracks_CN.items()}, ends_s


def _gain(dbfs: float) -> np.float32:
    return np.float32(10 ** (dbfs / 20))


def _panned(
    track_N: NDArray[np.float32], plan: ScenePlan, event: PlannedEvent, channels: int
) -> NDArray[np.float32]:
    """From where the object is, at constant power."""
    if channels == 1:
        return track_N[None]
    angle = math.pi / 2 * (event.lane + 0.5) / len(plan.events)
    return np.stack([track_N * np.float32(math.cos(angle)), track_N * np.float32(math.sin(angle))])


def _save_track(path: Path, track_CN: NDArray[np.int32], sample_rate: int) -> None:
    save(path, torch.from_numpy((track_CN / 32768).astype(np.float32)), sample_rate)


def _build_scene_sample(plan: ScenePlan, config: ComposeScenesConfig, ends_s: list[float]) -> Sample:
    caption = caption_of(plan)
    events: list[dict[str, Any]] = [
        {
            "label": event.sound.label,
            "name": event.sound.name,
            "start_s": event.onset_s,
            "end_s": end_s,
            "where": plan.place(event),
            "path": f"{plan.id}/event-{number}.flac",
            "region": [box.model_dump() for box in _region(plan, event, config)],
            "recording": event.sound.path.name,
        }
        for number, (event, end_s) in enumerate(zip(plan.events, ends_s, strict=True))
    ]
    backdrop = None
    if plan.backdrop is not None:
        backdrop = {
            "label": plan.backdrop.label,
            "name": plan.backdrop.name,
            "path": f"{plan.id}/backdrop.flac",
            "recording": plan.backdrop.path.name,
        }
    messages = [
        Message(role="user", content=[VideoPart(path=f"{plan.id}/video.mp4"), TextPart(text=caption)]),
        Message(role="assistant", content=[AudioPart(path=f"{plan.id}/mixture.flac")]),
    ]
    facts = {
        "split": "test" if plan.held_out else "train",
        "caption": caption,
        "thought": thought_of(plan),
        "events": events,
        "backdrop": backdrop,
    }
    return Sample(id=plan.id, messages=messages, task=TASK, metadata=facts)


def _region(plan: ScenePlan, event: PlannedEvent, config: ComposeScenesConfig) -> list[Region]:
    """Boxes of an object over time, within the picture."""
    boxes = []
    for time_s in frame_times(0.0, config.duration_s, _REGIONS_PER_S):
        placed = place_at(plan, event, time_s, config.side)
        left, top = max(0.0, placed.x - placed.half_width), max(0.0, placed.y - placed.half_height)
        right = min(config.side, placed.x + placed.half_width)
        bottom = min(config.side, placed.y + placed.half_height)
        box = Region(
            at_s=round(time_s, 4),
            x=round(left, 2),
            y=round(top, 2),
            width=round(right - left, 2),
            height=round(bottom - top, 2),
        )
        boxes.append(box)
    return boxes
