"""The step `objects`: things in the pictures that may sound, found by words and followed through the clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.recipe.stages import ModelPath
from pipelines.audiocot.answers.evidence import name_words
from pipelines.audiocot.answers.measured import numbers_in_scene, scene_events
from pipelines.audiocot.clip import ClipStep, SoundClip
from pipelines.steps.step import StepConfig, Value


class ObjectsConfig(StepConfig):
    """Settings of `objects`."""

    by: Literal["measured", "transformers"] = "measured"
    """Who finds objects: the truth of composed scenes, or a detector and a tracker in local folders."""
    detector: ModelPath | None = None
    """Folder of a GroundingDINO, which finds objects by words."""
    tracker: ModelPath | None = None
    """Folder of a SAM 2, which follows them."""
    min_score: float = Field(0.3, ge=0, le=1)
    """Smallest score of a found object."""
    max_objects: int = Field(4, ge=1, le=32)
    frame_rate: float = Field(4.0, gt=0, le=30)
    """Pictures per second in which objects are followed."""
    gpus: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _has_models(self) -> ObjectsConfig:
        if self.by == "transformers" and (self.detector is None or self.tracker is None):
            raise ValueError(
                "transformers needs detector and tracker: folders of a GroundingDINO and a SAM 2"
            )
        return self


class Objects(ClipStep[ObjectsConfig]):
    """Objects with their regions, each with the event of the record that it makes."""

    name = "objects"
    settings = ObjectsConfig
    needs: tuple[str, ...] = ("probe", "think")
    version: ClassVar[int] = 2

    def __init__(self, config: ObjectsConfig) -> None:
        super().__init__(config)
        self._finder: Any = None

    def missing(self) -> str | None:
        for key in ("detector", "tracker"):
            folder = getattr(self.config, key)
            if folder is not None and not (folder / "config.json").is_file():
                return f"objects.{key}: no model in {folder} (config.json): give a model's folder"
        return None

    def setup(self) -> None:
        """Load detector and tracker, where they are used.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        if self.config.by == "transformers":
            from pipelines.audiocot.steps.tracking import ObjectFinder

            assert self.config.detector is not None and self.config.tracker is not None
            self._finder = ObjectFinder(self.config.detector, self.config.tracker, bool(self.config.gpus))

    def process(self, item: SoundClip) -> Value:
        """`{objects: [{name, region: [{at_s, x, y, width, height}], score, event}]}`; times are those of the file.

        `event` is the number of the record's event that the object makes; null: none.

        Raises:
            VideoError: the pictures cannot be read.
        """
        if item.video is None:
            return {"objects": []}
        record = ThoughtRecord.model_validate(item.values["think"]["record"])
        if self._finder is None:
            return {"objects": _true_objects(item, record)}
        names = list(dict.fromkeys(event.source or event.sound for event in record.events))
        if not names:
            return {"objects": []}
        timed_pictures = list(item.pictures(self.config.frame_rate, None))
        times = [item.start_s + time_s for time_s, _ in timed_pictures]
        pictures = [picture for _, picture in timed_pictures]
        detected = self._finder.find(pictures, times, names, self.config.min_score, self.config.max_objects)
        return {
            "objects": [
                {**detected_object, "event": _event_of(detected_object["name"], record)}
                for detected_object in detected
            ]
        }


def _true_objects(item: SoundClip, record: ThoughtRecord) -> list[dict[str, Any]]:
    """The objects of a composed scene that are seen during the clip."""
    truth = item.facts.truth
    if truth is None:
        return []
    named = numbers_in_scene(record, truth, item.start_s, item.end_s)
    place_of = {number: place for place, number in named.items()}
    objects = []
    for number, event in enumerate(scene_events(truth)):
        region = _boxes_within(event.get("region") or (), item.start_s, item.end_s)
        if region:
            objects.append(
                {"name": event["name"], "region": region, "score": 1.0, "event": place_of.get(number)}
            )
    return objects


def _boxes_within(region: Sequence[Mapping[str, Any]], start_s: float, end_s: float) -> list[dict[str, Any]]:
    return [dict(box) for box in region if start_s <= box["at_s"] <= end_s]


def _event_of(name: str, record: ThoughtRecord) -> int | None:
    """The first event whose source or sound shares a word with the object's name."""
    words = name_words(name)
    for number, event in enumerate(record.events):
        if words & (name_words(event.sound) | name_words(event.source or "")):
            return number
    return None
