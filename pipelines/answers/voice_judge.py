"""The stage `train_voice_judge`: a classifier of the samples' speakers, for rewards and scores of voices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan


class VoiceJudgeConfig(StageConfig):
    """Settings of the stage `train_voice_judge`."""

    samples: InputPath
    """A .jsonl of samples in which named speakers say texts (task tts); those of the test split are not heard."""
    seed: int = 1
    """Seed of its training. The judge that `evaluate` trains has another one, and shares nothing with it."""


def run_voice_judge(config: VoiceJudgeConfig, context: Context) -> dict[str, Any]:
    """Train the judge and save it to `judge`.

    Raises:
        StageError: fewer than two speakers have recordings enough (exit code 2).
    """
    from audiollm.data.records.manifest import read_samples
    from pipelines.answers.voices import STEPS, recordings_of_speakers, trained_voice_judge

    samples, _ = read_samples(config.samples)
    with context.progress("training the judge of voices", STEPS) as bar:
        try:
            trained_voice_judge(
                samples,
                context.folder / "judge",
                config.seed,
                lambda step, _: bar.update(bar.task_ids[0], completed=step),
            )
        except ConfigError as error:
            raise StageError(error.message, error.remedy, 2) from error
    return {"speakers": len(recordings_of_speakers(samples))}


def plan_voice_judge(config: VoiceJudgeConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(memory_mb=900, disk_mb=2, core_seconds=60, note="a classifier of speakers")


STAGE = Stage(
    kind="train_voice_judge",
    config=VoiceJudgeConfig,
    run=run_voice_judge,
    artifacts={"judge": "judge"},
    help="train a judge of the samples' voices, for rewards",
    plan=plan_voice_judge,
)
