"""A planned scene is made: solo tracks, their sum, pictures, and the record of all of it.

Tracks are rounded to 16 bits before they are added, so that the mixture is the sum of its tracks sample for sample.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.data.records.sample import AudioPart, Message, Region, Sample, TextPart, VideoPart
from audiollm.video.frames import frame_times
from audiollm.video.writing import write_video
from pipelines.scenes.pictures import draw_scene, place_at
from pipelines.scenes.plans import PlannedEvent, ScenePlan, caption_of, thought_of
from pipelines.scenes.settings import ComposeScenesConfig
from pipelines.scenes.sounds import load_backdrop, load_event

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
