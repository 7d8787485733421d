"""A judge of the sounds of scenes, trained on their solo tracks: it shares nothing with the model that is judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.audio import AudioError, load
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.errors import StageError
from audiollm.evaluate.judges.classifier import (
    ClassifierConfig,
    ClipClassifier,
    UntrainableError,
    train_classifier,
)
from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import read_json, write_json

MOST_CLIPS = 1000
"""Sounds that the judge is trained on, and at most so many are held out."""
NOTHING = "nothing"
"""Label of the longest stretch of a scene in which its backdrop alone is heard."""
LEAST_STRETCH_S, LEAST_PEAK = 0.2, 1e-3
"""Shorter or silent ones teach nothing: the judge looks at what is not silent."""
Clip = tuple[Tensor, int]


def event_judge(samples: Path, folder: Path, steps: int) -> tuple[ClipClassifier, dict[str, Any]]:
    """The judge of `samples`, trained on the sounds of the training scenes, and its share of right held-out ones.

    It says `nothing` of stretches without any of the sounds: a removed sound would be heard as another one otherwise.
    A judge that is in `folder` already is loaded.

    Args:
        samples: scenes (.jsonl) whose `metadata.events` have solo tracks, as `compose_scenes` makes them.

    Raises:
        StageError: no such sounds, or fewer than two labels.
    """
    if (folder / "classifier.json").exists() and (folder / "accuracy.json").exists():
        return ClipClassifier.load(folder), read_json(folder / "accuracy.json")
    all_samples, _ = read_samples(samples)
    clips: dict[bool, tuple[list[Clip], list[str]]] = {}
    for held_out in (False, True):
        split_samples = [sample for sample in all_samples if sample.is_held_out is held_out]
        clips[held_out] = _event_clips(split_samples, samples.parent)
    try:
        judge = train_classifier(*clips[False], ClassifierConfig(steps=steps))
    except UntrainableError as error:
        raise StageError(
            f"no judge can be trained on {samples}: {error}",
            "give scenes whose metadata.events have label, path, start_s and end_s (compose_scenes)",
            2,
        ) from error
    predictions = judge.predict_many(clips[True][0])
    accuracy = share(
        [predicted == label for (predicted, _), label in zip(predictions, clips[True][1], strict=True)]
    )
    judge.save(folder)
    write_json(folder / "accuracy.json", accuracy)
    return judge, accuracy


# Private


def _event_clips(samples: Sequence[Sample], folder: Path) -> tuple[list[Clip], list[str]]:
    """Each sound of the scenes, cut out of its own track, and its label; evenly picked where there are many.

    Stretches without a sound are as many as the sounds of a label on average.
    """
    scenes = [(scene, events) for scene in samples if (events := _events_of(scene))]
    parts = [
        (str(event["label"]), str(event["path"]), float(event["start_s"]), float(event["end_s"]))
        for _, events in scenes
        for event in events
    ]
    parts = parts[:: max(1, -(-len(parts) // MOST_CLIPS))]
    quiet = [stretch for scene, events in scenes if (stretch := _longest_stretch(scene, events))]
    num_quiet = len(parts) // max(1, len({label for label, *_ in parts}))
    parts += quiet[:: max(1, len(quiet) // max(1, num_quiet))]
    clips, labels = [], []
    for label, path_text, start_s, end_s in parts:
        path = Path(path_text)
        try:
            clip = load(path if path.is_absolute() else folder / path, start_s, end_s)
        except AudioError:
            continue
        if label == NOTHING and float(clip.samples_CN.abs().max()) < LEAST_PEAK:
            continue
        clips.append((clip.samples_CN, clip.sample_rate))
        labels.append(label)
    return clips, labels


def _events_of(sample: Sample) -> list[dict[str, Any]]:
    events = sample.metadata.get("events") or []
    return [event for event in events if {"label", "path", "start_s", "end_s"} <= set(event)]


def _longest_stretch(scene: Sample, events: Sequence[dict[str, Any]]) -> tuple[str, str, float, float] | None:
    """The longest stretch of the whole sound before or between the events; None for none of any length."""
    wholes = [
        content_part
        for content_part in scene.messages[-1].content
        if isinstance(content_part, AudioPart) and content_part.path
    ]
    if not wholes:
        return None
    spans = sorted((float(event["start_s"]), float(event["end_s"])) for event in events)
    starts = [0.0, *accumulate((end for _, end in spans), max)]
    stretches = [(start, before) for start, (before, _) in zip(starts, spans, strict=False)]
    start_s, end_s = max(stretches, key=lambda stretch: stretch[1] - stretch[0])
    begin_s = wholes[0].start_s
    return (
        (NOTHING, str(wholes[0].path), begin_s + start_s, begin_s + end_s)
        if end_s - start_s >= LEAST_STRETCH_S
        else None
    )
