"""Edits to learn from scenes with solo tracks: a sound added, laid over, removed, or extracted.

`add` wants the mixture; `overlay` wants the added sound alone, to be laid over the track; `remove` wants the track
without the sound; `extract` wants the sound alone, out of the mixture.

A scene's `metadata["events"]` has for each sound its track, its name and the region of its object. The track before an
edit and the wanted one are sums of tracks, so that they are equal sample for sample where the sound is silent.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.audio import AudioError, load, set_channels
from audiollm.data.records.sample import Message, Region, Sample, TextPart
from audiollm.errors import BadSample
from audiollm.flow.conditions.edit_texts import EDITS, THIS, EditName, edit_thought, edit_words

_POINTED_SHARE = 1 / 3
"""Share of the edits with a region in which the sound has no other name."""


class SceneEdit(NamedTuple):
    """An edit of a scene, as a sample to learn from."""

    sample: Sample
    """The words and the picture of the edit; its sounds are the two below."""
    input_CN: Tensor
    wanted_CN: Tensor


def draw_edits(
    sample: Sample, folder: Path, sample_rate: int, channels: int, count: int, place: str
) -> list[SceneEdit]:
    """Up to `count` edits of a scene, drawn by its id; none where it has no solo tracks.

    Raises:
        BadSample: an event without a path, a name or a valid region, or a track that cannot be read.
    """
    events = sample.metadata.get("events")
    if not isinstance(events, list) or not events or not count:
        return []
    dice = random.Random(f"edits of {sample.id}")
    choices = [(operation, number) for operation in EDITS for number in range(len(events))]
    if len(events) == 1 and not sample.metadata.get("backdrop"):
        choices = [
            choice for choice in choices if choice[0] == "add"
        ]  # else nothing is left, or nothing goes
    drawn_choices = dice.sample(choices, min(count, len(choices)))
    try:
        tracks = [event_track(event["path"], folder, sample_rate, channels) for event in events]
        backdrop = sample.metadata.get("backdrop")
        behind = [event_track(backdrop["path"], folder, sample_rate, channels)] if backdrop else []
        return [
            _build_scene_edit(
                sample, events, operation, number, tracks, behind, at, dice.random() < _POINTED_SHARE
            )
            for at, (operation, number) in enumerate(drawn_choices)
        ]
    except AudioError as error:
        raise BadSample(place, sample.id, str(error), "unreadable track of an event") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        message = " ".join(str(error).split())
        reason = f"events need path, name and region, and tracks one length ({type(error).__name__}: {message:.120})"
        raise BadSample(place, sample.id, reason, "wrong events") from error


def event_track(path: str, folder: Path, sample_rate: int, channels: int) -> Tensor:
    """The track `[C, N]` of an event or backdrop, whose path is relative to the folder of the samples.

    Raises:
        AudioError: it cannot be read.
    """
    at = Path(path) if Path(path).is_absolute() else folder / path
    return set_channels(load(at, sample_rate=sample_rate).samples_CN, channels)


# Private


def _build_scene_edit(
    sample: Sample,
    events: list[Mapping[str, Any]],
    operation: EditName,
    number: int,
    tracks: list[Tensor],
    behind: list[Tensor],
    at: int,
    may_point: bool,
) -> SceneEdit:
    event = events[number]
    all_CN = torch.stack([*tracks, *behind]).sum(dim=0)
    rest_CN = all_CN - tracks[number]
    pairs = {
        "add": (rest_CN, all_CN),
        "overlay": (rest_CN, tracks[number]),
        "remove": (all_CN, rest_CN),
        "extract": (all_CN, tracks[number]),
    }
    input_CN, wanted_CN = pairs[operation]
    videos = sample.video_parts()
    region = [Region.model_validate(box) for box in event.get("region") or []]
    points = may_point and bool(videos and region)
    other_names = [str(other_event["name"]) for index, other_event in enumerate(events) if index != number]
    words = edit_words(operation, THIS if points else str(event["name"]), [] if points else other_names)
    content: list[Any] = [video.model_copy(update={"region": region}) for video in videos[:1]]
    facts = {key: value for key, value in sample.metadata.items() if key in ("split", "caption")}
    metadata = {**facts, "operation": operation, "event": dict(event)}
    if not points:
        timed = "start_s" in event
        metadata["thought"] = edit_thought(words, event["start_s"], event["end_s"]) if timed else words
    edited = Sample(
        id=f"{sample.id}-{operation}-{at}",
        messages=[Message(role="user", content=[*content, TextPart(text=words)])],
        task=sample.task,
        metadata=metadata,
    )
    return SceneEdit(edited, input_CN, wanted_CN)
