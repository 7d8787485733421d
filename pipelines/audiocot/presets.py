"""Named sets of steps and thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.audiocot.rules import ClipThresholds


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
