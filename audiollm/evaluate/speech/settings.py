"""The stage `evaluate`: what independent judges make of generated audio, and what of real audio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from audiollm.recipe.stages import InputPath, StageConfig


class EvaluationConfig(StageConfig):
    audio: InputPath
    """The clips to judge: `generated.jsonl` of the stage generate."""
    samples: InputPath
    """`samples.jsonl` of the stage compose: training takes train the judges, test takes are the scale."""
    suite: Literal["tts"] = "tts"
    """The benchmark family. tts: is the asked text heard, in the asked voice?"""
    reference_audio: InputPath | None = None
    """JSONL of the form of `audio`: real test takes through the codec alone, to know what that costs."""
    judge_steps: int = Field(default=400, ge=1)
    """Training steps of each trained judge."""
    judge_clips: int = Field(default=3000, ge=2)
    """At most so many training takes are used for each judge (a seeded choice, equally many of each label)."""
    seed: int = Field(default=0, ge=0)
    """Of the judges' training; the recipe's by default."""
    workers: int = Field(default=2, ge=1)
    """Judges that are trained at a time, each in one thread: the judges are the same whatever the number."""
