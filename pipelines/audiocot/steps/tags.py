"""The step `tags`: sounds with times by a tagger (YAMNet), and how far a clip is voice or music."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipelines.annotate.steps.events import Events, EventsConfig
from pipelines.audiocot.answers.evidence import kind_scores
from pipelines.audiocot.clip import SoundClip
from pipelines.steps.step import Resources, Value


class TagsConfig(EventsConfig):
    """Settings of `tags`: those of the annotation's `events`."""


class Tags:
    """Sound events with times, tags, and scores of voice and music."""

    name = "tags"
    level: ClassVar[Literal["clip"]] = "clip"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2

    def __init__(self, config: TagsConfig) -> None:
        self._events = Events(config)
        self.resources = Resources(gpus=config.gpus)

    def missing(self) -> str | None:
        reason = self._events.missing()
        return None if reason is None else reason.replace("events.", "tags.", 1)

    def setup(self) -> None:
        self._events.setup()

    def process(self, item: SoundClip) -> Value:
        """`{events: [{label, start_s, end_s, score}], tags: [{label, score}], kinds: {voice, music}}`."""
        found = self._events.process(item)
        return {**found, "kinds": kind_scores(found["events"], found["tags"])}
