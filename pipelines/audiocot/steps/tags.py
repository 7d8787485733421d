"""The step `tags`: sounds with names and times by a tagger (YAMNet), and how far a clip is voice or music."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipelines.annotate.steps.events import Events, EventsConfig
from pipelines.audiocot.answers.evidence import kind_scores
from pipelines.audiocot.answers.naming import name_sounds
from pipelines.audiocot.clip import SoundClip
from pipelines.steps.step import Resources, Value


class TagsConfig(EventsConfig):
    """Settings of `tags`: those of the annotation's `events`."""


class Tags:
    """Sound events with times, tags, the sounds that these are, and scores of voice and music."""

    name = "tags"
    level: ClassVar[Literal["clip"]] = "clip"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 3

    def __init__(self, config: TagsConfig) -> None:
        self._config, self._events = config, Events(config)
        self.resources = Resources(gpus=config.gpus)

    def missing(self) -> str | None:
        reason = self._events.missing()
        return None if reason is None else reason.replace("events.", "tags.", 1)

    def setup(self) -> None:
        self._events.setup()

    def process(self, item: SoundClip) -> Value:
        """`{events: [{label, start_s, end_s, score}], tags: [{label, score}], sounds: [{label, start_s, end_s, score}],
        kinds: {voice, music}}`.

        `events` has every class that is heard; `sounds` has each sound once, with `label` null where no class is sure.
        """
        window_scores, middles_s = self._events.hear(item)
        value = self._events.value_of(window_scores, middles_s, item.duration_s)
        onset, offset = self._config.onset, self._config.offset
        sounds = name_sounds(window_scores, middles_s, item.duration_s, onset, offset)
        return {
            **value,
            "sounds": [sound._asdict() for sound in sounds],
            "kinds": kind_scores(value["events"], value["tags"]),
        }
