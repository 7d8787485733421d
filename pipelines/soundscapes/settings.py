"""Settings of `compose_soundscapes`. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from audiollm.recipe.stages import InputPath, StageConfig
from pipelines.scenes.settings import SoundFolder, SoundSource

Kind = Literal["which", "presence", "count", "order", "loudness", "voice", "words"]
LEAD_S, TAIL_S = 0.2, 0.2
"""Silence before the first event, and after the last."""


def _list_of_paths(value: object) -> object:
    return value if isinstance(value, list) else [value]


class ComposeSoundscapesConfig(StageConfig):
    """Settings of the stage `compose_soundscapes`."""

    events: list[SoundSource] = Field(default=[])
    """Folders of labelled sounds, such as barks and rain."""
    music: list[SoundFolder] = Field(default=[])
    """Folders of music; every file is the sound `music`."""
    segments: Annotated[list[InputPath], BeforeValidator(_list_of_paths)] = Field(default=[])
    """`segments.jsonl` of annotations, one or several. Test segments of a speaker who is trained on are set aside:
    held-out clips have speakers of their own."""
    backgrounds: list[SoundFolder] = Field(default=[])
    """Folders of sounds that lie behind each clip, such as rooms and streets; no question is about them."""
    clips: int = Field(1000, ge=1)
    """Clips to train on, with a question each."""
    test_clips: int = Field(100, ge=0)
    """Held-out clips, of held-out recordings, takes and speakers alone."""
    kinds: list[Kind] | None = Field(None, min_length=1)
    """Kinds of questions, equally many of each; null: all that the inputs can serve."""
    options: int = Field(4, ge=2, le=10)
    """Most options of `which` and `words`."""
    duration_s: float = Field(10.0, ge=1.0, le=30.0)
    """Longest clip; a clip ends with its last event."""
    event_s: float = Field(2.0, gt=0.1)
    """Longest sound: the loudest part of its recording."""
    speech_s: float = Field(4.0, gt=0.3)
    """Longest segment of speech that is used."""
    gap_s: tuple[float, float] = (0.1, 0.4)
    """Shortest and longest silence between events."""
    event_dbfs: float = Field(-22.0, ge=-40.0, le=-16.0)
    """Level of events (RMS), give or take 2 dB."""
    loudness_db: float = Field(12.0, ge=3.0, le=24.0)
    """Difference between the two sounds of `loudness`."""
    background_dbfs: float = Field(-45.0, ge=-70.0, le=-20.0)
    """Level of the background."""
    sample_rate: int = Field(16_000, ge=8000, le=48_000)
    """Samples per second."""
    seed: int = 0
    """Seed of the soundscapes and of their questions."""

    @model_validator(mode="after")
    def _has_inputs(self) -> ComposeSoundscapesConfig:
        if not self.events and not self.segments:
            raise ValueError(
                "nothing to compose: name folders of labelled sounds (events) or segments of speech"
            )
        return self

    @model_validator(mode="after")
    def _events_fit(self) -> ComposeSoundscapesConfig:
        if not 0 <= self.gap_s[0] <= self.gap_s[1]:
            raise ValueError(f"gap_s must rise from at least 0, not {self.gap_s[0]:g} to {self.gap_s[1]:g}")
        parts_s = [3 * self.event_s] if self.events else []
        parts_s += [2 * self.speech_s, self.speech_s + 2 * self.event_s] if self.segments else []
        longest_s = LEAD_S + max(parts_s) + 2 * self.gap_s[1] + TAIL_S
        if longest_s > self.duration_s:
            raise ValueError(
                f"three events (or two of speech) take up to {longest_s:.1f} s, and duration_s is {self.duration_s:g}: "
                "lower event_s or speech_s, or raise duration_s"
            )
        return self
