"""The stage `evaluate`: what independent judges make of generated audio, and what of real audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan


class Config(StageConfig):
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


def run(config: Config, context: Context) -> dict[str, Any]:
    """Train (or find) the judges, hear every clip, write scores and clips, return the main figures."""
    from audiollm.evaluate.speech.run import evaluate_speech

    return evaluate_speech(config, context)


def plan(config: Config, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Measured on 2 cores: 0.05 s a training step of a judge on clips of half a second, 25 s for the rest."""
    return StagePlan(
        parameters=2 * 157_000,
        memory_mb=1_000,
        disk_mb=2,
        seconds=25 + 2 * 0.05 * config.judge_steps,
        note="two judges trained on real takes, and pocketsphinx",
    )


STAGE = Stage(
    kind="evaluate",
    config=Config,
    run=run,
    artifacts={"scores": "scores.json", "clips": "clips.jsonl"},
    help="have independent judges score generated audio against real recordings",
    plan=plan,
)
