"""Reasons to drop a clip: thresholds by name, rules that compare measured values with them, and presets of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipelines.steps.rules import Rule


class ClipThresholds(BaseModel):
    """Limits that a kept clip must meet; null: no limit. A preset sets them, and each may be set by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    min_duration_s: float | None = Field(None, ge=0)
    """Shortest clip in seconds; null: the length that clips are cut to."""
    min_level_dbfs: float | None = None
    """Quieter clips are silent."""
    max_voice: float | None = Field(None, ge=0, le=1)
    """Highest score of human voice: speech, singing, shouts, laughter and crying."""
    max_music: float | None = Field(None, ge=0, le=1)
    """Highest score of music."""
    min_sound_text: float | None = Field(None, ge=-1, le=1)
    """Smallest cosine of a clip's sound and its text."""
    min_picture_text: float | None = Field(None, ge=-1, le=1)
    """Smallest mean cosine of a clip's pictures and its text."""
    min_sounds: int | None = Field(None, ge=0)
    """Fewest sounds that the record names."""
    max_balance: float | None = Field(None, ge=1)
    """Most clips of music for one of effects, and the reverse; the others are drawn to be dropped."""


RULES: tuple[Rule, ...] = (
    Rule("min_duration_s", "segment", "duration_s", ">=", "too short", " s"),
    Rule("min_level_dbfs", "levels", "level_dbfs", ">=", "silent", " dBFS"),
    Rule("max_voice", "tags", "kinds.voice", "<=", "voice"),
    Rule("max_music", "tags", "kinds.music", "<=", "music"),
    Rule("min_sound_text", "agreement", "sound_text", ">=", "sound and text disagree", option="sound_text"),
    Rule(
        "min_picture_text",
        "agreement",
        "picture_text",
        ">=",
        "picture and text disagree",
        option="picture_text",
    ),
    Rule("min_sounds", "think", "sounds", ">=", "no sound named", " sounds"),
)
BALANCE = Rule("max_balance", "corpus", "balance", "<=", "out of balance", " to one")
"""The rule over all clips; it is applied after those of single clips."""


@dataclass(frozen=True)
class ClipPreset:
    """Steps and thresholds that a preset's name stands for.

    Args:
        about: the sets that the preset is for.
        steps: optional steps with their settings; the others are always there.
    """

    about: str
    thresholds: ClipThresholds
    clip_s: float | None
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


PRESETS: Mapping[str, ClipPreset] = {
    # 9.1 s, no silence, no voices, music and effects one to one: as AudioCoT's authors state it; the levels are ours
    "thinksound": ClipPreset(
        "videos and recordings without speech, for sound models (ThinkSound)",
        ClipThresholds(min_level_dbfs=-50.0, max_voice=0.3, min_sounds=1, max_balance=1.2),
        9.1,
        {"tags": {}},
    ),
    "everything": ClipPreset(
        "all that sounds, speech too, whole files",
        ClipThresholds(min_duration_s=0.5, min_level_dbfs=-60.0),
        None,
    ),
}
