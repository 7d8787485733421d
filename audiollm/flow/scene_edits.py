"""The work of the stage `edit_sounds`: edits of scenes whose sounds are known one by one, and their list.

A scene's tracks are summed to the track before the edit and to the one that a perfect edit would give. An edit that is
there already is kept, so that a killed run goes on.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import AudioError
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Region, Sample, VideoPart
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.files.set_aside import SetAside
from audiollm.flow.conditions.edits import event_track
from audiollm.flow.conditions.reading import COT
from audiollm.flow.editing.operations import Operation, edit_track, find_span
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.tracks import Track, read_track
from audiollm.flow.generate import chosen_samples
from audiollm.flow.generator import SoundGenerator, sampler_settings
from audiollm.flow.settings import EditSoundsConfig
from audiollm.flow.sound_model import check_guidance
from audiollm.recipe.runner import Context

SHORTEST_START_S = 0.5
"""`extend` needs at least this much of a scene before the sound."""


def edit_sounds(config: EditSoundsConfig, context: Context) -> dict[str, Any]:
    """Edit the scenes into `audio`, and list the edits in `edited.jsonl`.

    Raises:
        StageError: no scene can be edited.
        ConfigError: the model or its autoencoder cannot be loaded, or was not trained for edits.
    """
    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "edit_sounds")
    set_aside.add(bad)
    with_events = [sample for sample in samples if sample.metadata.get("events")]
    selected_samples = chosen_samples(with_events, config.split, config.max_samples)
    generator = SoundGenerator.load(config.model, config.autoencoder)
    check_guidance(generator.model.config, sampler_settings(config.sampling), "edit_sounds.sampling")
    rows: list[dict[str, Any]] = []
    with context.progress("editing scenes", len(selected_samples)) as bar:
        for number, sample in enumerate(selected_samples):
            edits, bad = _edit_all(sample, number, config, generator, context.folder)
            rows += edits
            set_aside.add(bad)
            bar.advance(bar.task_ids[0])
    if not rows:
        raise StageError(
            f"edit_sounds: none of {len(samples)} samples can be edited",
            "give scenes whose metadata.events have solo tracks (compose_scenes); see "
            f"{context.folder / 'set_aside.jsonl'}",
            2,
        )
    write_jsonl(context.folder / "edited.jsonl", rows)
    return {"edits": len(rows), "set_aside": len(set_aside.rows)}


# Private


def _edit_all(
    sample: Sample, number: int, config: EditSoundsConfig, generator: SoundGenerator, folder: Path
) -> tuple[list[dict[str, Any]], list[BadSample]]:
    """The rows of a scene's edits, and the reasons for those that cannot be made."""
    rows, bad = list[dict[str, Any]](), list[BadSample]()
    try:
        scene = _read_scene(sample, number, config, generator)
    except BadSample as error:
        return rows, [error]
    for operation in config.operations:
        for by in config.by if operation in ("add", "remove") else ["words"]:
            try:
                row = _edit_scene(scene, operation, by, config, generator, folder)
            except BadSample as error:
                bad.append(error)
                continue
            rows += [row] if row else []
    return rows, bad


@dataclass(frozen=True)
class _Scene:
    """A scene, the sound in it that is edited, and its tracks."""

    sample: Sample
    event: Mapping[str, Any]
    other_events: Sequence[Mapping[str, Any]]
    without_CN: Tensor
    """The scene without the sound."""
    whole_CN: Tensor


def _read_scene(sample: Sample, number: int, config: EditSoundsConfig, generator: SoundGenerator) -> _Scene:
    """The scene with one of its sounds chosen, another one in each next scene.

    Raises:
        BadSample: an event without a path, a name or times, or a track that cannot be read.
    """
    folder, codec, place = config.samples.parent, generator.autoencoder, f"{config.samples}: {sample.id}"

    def track(event: Mapping[str, Any]) -> Tensor:
        return event_track(event["path"], folder, codec.sample_rate, codec.channels)

    try:
        events = [_parse_scene_event(candidate) for candidate in sample.metadata["events"]]
        event = events[number % len(events)]
        other_events = [candidate for candidate in events if candidate is not event]
        backdrop = sample.metadata.get("backdrop")
        behind = [track(candidate) for candidate in [*other_events, *([backdrop] if backdrop else [])]]
        own_CN = track(event)
        without_CN = torch.stack(behind).sum(dim=0) if behind else torch.zeros_like(own_CN)
        return _Scene(sample, event, other_events, without_CN, without_CN + own_CN)
    except AudioError as error:
        raise BadSample(place, sample.id, str(error), "unreadable track of an event") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"events need path, name, start_s and end_s, and tracks one length ({error!r:.120})"
        raise BadSample(place, sample.id, reason, "wrong events") from error


def _parse_scene_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with its name as text and its times as numbers.

    Raises:
        KeyError, TypeError, ValueError: it lacks one, or a time is no finite number.
    """
    times = {key: float(event[key]) for key in ("start_s", "end_s")}
    if not all(map(math.isfinite, times.values())):
        raise ValueError(f"times are {times}")
    return {**event, "name": str(event["name"]), **times}


def _edit_scene(
    scene: _Scene,
    operation: Operation,
    by: str,
    config: EditSoundsConfig,
    generator: SoundGenerator,
    folder: Path,
) -> dict[str, Any] | None:
    """Edit one scene, or keep the edit that is there. Returns its row; None: it has too little before the sound.

    Raises:
        BadSample: the video cannot be read, or the sound does not lie in the track.
    """
    rate, event = generator.sample_rate, scene.event
    begin_s = max(0.0, event["start_s"] - config.margin_s)
    end_s = min(scene.whole_CN.shape[1] / rate, event["end_s"] + config.margin_s)
    if operation == "extend" and begin_s < SHORTEST_START_S:
        return None
    before_CN = {"add": scene.without_CN, "extend": scene.whole_CN[:, : round(begin_s * rate)]}.get(
        operation, scene.whole_CN
    )
    wanted_CN = scene.without_CN if operation == "remove" else scene.whole_CN
    name = safe_name(f"{scene.sample.id}-{operation}-{by}")
    paths = {role: f"audio/{name}-{role}.wav" for role in ("before", "after", "real")}
    request = _build_edit_request(scene, operation, by, begin_s, end_s)
    if not (folder / paths["after"]).exists():
        empty = Track(torch.zeros(0, len(before_CN), dtype=torch.int32).numpy(), rate, "WAV", "PCM_16")
        for role, track_CN in (("before", before_CN), ("real", wanted_CN)):
            (folder / "audio").mkdir(exist_ok=True, parents=True)
            empty.replaced(0, track_CN).save(folder / paths[role])
        before = read_track(folder / paths["before"])
        place = f"{config.samples}: {scene.sample.id}"
        try:
            span = find_span(before, operation, None if operation == "extend" else begin_s, end_s)
        except ConfigError as error:
            raise BadSample(place, scene.sample.id, error.message, "wrong events") from error
        conditions = edit_conditions(generator, request, place)
        settings, key = sampler_settings(config.sampling), f"{config.seed}/{name}"
        edit_track(generator, before, operation, span, conditions, settings, key).track.save(
            folder / paths["after"]
        )
    return {
        "id": scene.sample.id,
        "operation": operation,
        "by": by,
        "caption": request.caption,
        "before": paths["before"],
        "audio": paths["after"],
        "reference": paths["real"],
        "span": [round(second * rate) / rate for second in (begin_s, end_s)],  # to the sample
        "event": {key: event[key] for key in ("label", "name", "start_s", "end_s") if key in event},
        "others": [
            {key: other_event[key] for key in ("label", "name", "start_s", "end_s") if key in other_event}
            for other_event in scene.other_events
        ],
    }


def _build_edit_request(
    scene: _Scene, operation: Operation, by: str, begin_s: float, end_s: float
) -> EditRequest:
    """The edit in words: of the sound alone, or of the whole scene where a part of it is made anew.

    By its object alone a sound has no name: the region says which one it is.
    """
    sample, name = scene.sample, str(scene.event["name"])
    if operation in ("add", "remove"):
        caption, cot = (name, "") if by == "words" else ("", "")
    else:
        caption, cot = " ".join(sample.texts("user")), str(sample.metadata.get(COT, ""))
    video: VideoPart | None = None
    if by == "object":
        videos = sample.video_parts()
        boxes = [Region.model_validate(box) for box in scene.event.get("region") or []]
        if not videos or not boxes:
            raise BadSample(sample.id, sample.id, "no video, or no region of the sound", "no object")
        video = videos[0].model_copy(update={"region": boxes})
    return EditRequest(operation, caption, begin_s, end_s, cot, video)
