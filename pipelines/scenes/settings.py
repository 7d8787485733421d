"""Settings of `compose_scenes`."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from audiollm.recipe.stages import InputPath, StageConfig


class SoundFolder(BaseModel):
    """Recordings in a folder."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    folder: InputPath
    held_out: str | None = None
    """Shell pattern of the file names of which test clips are made, and no others; null: a tenth, by a hash."""


class SoundSource(SoundFolder):
    """Short recordings of labelled sounds in a folder."""

    label: str | None = None
    """Regular expression for the label in a file's path below the folder, its first group; null: the name of the
    folder that the file lies in, without a number before it ("001 - Dog bark" is "dog bark")."""
    labels: list[str] | None = Field(None, min_length=1)
    """Labels that are used; null: all."""
    names: dict[str, str] = Field(default={})
    """Label -> the words of captions, where they are others."""

    @field_validator("label")
    @classmethod
    def _has_a_group(cls, label: str | None) -> str | None:
        if label is not None:
            try:
                groups = re.compile(label).groups
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
            if groups < 1:
                raise ValueError("must have a group in parentheses, which is the label")
        return label


class ComposeScenesConfig(StageConfig):
    """Settings of the stage `compose_scenes`."""

    events: list[SoundSource] = Field(default=[])
    """Sounds of objects, such as barks, ticks and spoken digits; none: bells, drums and others that are made here, over
    made rain and wind."""
    backdrops: list[SoundSource] = Field(default=[])
    """Sounds behind them, such as rain; each scene has one of them, or none as often as any."""
    scenes: int = Field(1000, ge=1)
    """Scenes to train on."""
    held_out_scenes: int = Field(100, ge=0)
    """Test scenes, made of held-out recordings alone."""
    max_events: int = Field(3, ge=1, le=4)
    """Most events of a scene."""
    duration_s: float = Field(3.0, ge=1.0, le=60.0)
    """Length of a scene."""
    event_s: float = Field(1.0, gt=0.05)
    """Length of a sound at most: the loudest part of its recording."""
    apart_s: float = Field(0.5, gt=0.0)
    """Time between the beginnings of two sounds at least."""
    sample_rate: int = Field(16000, ge=8000, le=48000)
    """Samples per second."""
    channels: int = Field(1, ge=1, le=2)
    """2: sounds come from where their objects are."""
    side: int = Field(64, ge=32, le=512, multiple_of=2)
    """Height and width of the pictures."""
    frame_rate: int = Field(24, ge=4, le=60)
    """Pictures per second."""
    event_dbfs: float = Field(-20.0, ge=-40.0, le=-12.0)
    """Level of events, give or take 3 dB."""
    backdrop_dbfs: float = Field(-34.0, ge=-60.0, le=-12.0)
    """Level of the backdrop."""
    seed: int = 0
    """Seed of the scenes."""

    @model_validator(mode="after")
    def _backdrops_have_events(self) -> ComposeScenesConfig:
        if self.backdrops and not self.events:
            raise ValueError("backdrops need events: name folders of both, or of neither")
        return self
