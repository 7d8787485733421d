"""Reasons to drop a clip: thresholds by name, and the rules that compare measured values with them."""

from __future__ import annotations

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
