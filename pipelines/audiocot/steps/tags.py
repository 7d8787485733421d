"""The step `tags`: sounds with names and times by a tagger (YAMNet), and how far a clip is voice or music."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from audiollm.evaluate.judges.taggers import WindowScores
from pipelines.annotate.steps.events import Events, EventsConfig
from pipelines.audiocot.answers.evidence import kind_scores, loudness_of
from pipelines.audiocot.answers.naming import name_sounds
from pipelines.audiocot.clip import ClipStep, SoundClip
from pipelines.steps.step import Value

_SAME_WINDOW_S = 0.05
"""A window whose middle is so near to that of another one hears the same."""


class TagsConfig(EventsConfig):
    """Settings of `tags`: those of the annotation's `events`."""


class Tags(ClipStep[TagsConfig]):
    """Sound events with times, tags, the sounds that these are, and scores of voice and music."""

    name = "tags"
    settings = TagsConfig
    needs: tuple[str, ...] = ("levels",)
    version: ClassVar[int] = 4

    def __init__(self, config: TagsConfig) -> None:
        super().__init__(config)
        self._events = Events(config)

    def missing(self) -> str | None:
        reason = self._events.missing()
        return None if reason is None else reason.replace("events.", "tags.", 1)

    def setup(self) -> None:
        self._events.setup()

    def process(self, item: SoundClip) -> Value:
        """`{events: [{label, start_s, end_s, score}], tags: [{label, score}], sounds: [{label, start_s, end_s, score}],
        kinds: {voice, music}}`.

        `events` has every class that is heard; `sounds` has each sound once, with `label` null where no class is sure.
        For `sounds` each loud span is also heard in the middle of a window: those of the hop may cut a short sound.
        """
        grid_s = self._events.middles(item)
        centred_s = self._span_middles(item, grid_s)
        middles_s = sorted([*grid_s, *centred_s])
        labels, scores_FK = self._events.hear(item, middles_s)
        in_grid_F = [middle_s not in centred_s for middle_s in middles_s]
        value = self._events.value_of(WindowScores(labels, scores_FK[in_grid_F]), grid_s, item.duration_s)
        onset, offset = self.config.onset, self.config.offset
        sounds = name_sounds(WindowScores(labels, scores_FK), middles_s, item.duration_s, onset, offset)
        return {
            **value,
            "sounds": [sound._asdict() for sound in sounds],
            "kinds": kind_scores(WindowScores(labels, scores_FK)),
        }

    def _span_middles(self, item: SoundClip, grid_s: Sequence[float]) -> list[float]:
        """The middles of windows around the loud spans, around its beginning where one is longer; no window twice."""
        levels, window_s = item.values["levels"], self._events.window_s
        loudness = loudness_of(levels["curve_dbfs"], levels["onsets_s"], item.duration_s)
        middles_s: list[float] = []
        for start_s, end_s in loudness.spans:
            middle_s = (start_s + min(end_s, start_s + window_s)) / 2
            middle_s = min(max(middle_s, grid_s[0]), grid_s[-1])
            if all(abs(middle_s - same_s) > _SAME_WINDOW_S for same_s in (*grid_s, *middles_s)):
                middles_s.append(middle_s)
        return middles_s
