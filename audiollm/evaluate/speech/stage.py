"""The stage `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.evaluate.speech.settings import POCKETSPHINX, EvaluationConfig
from audiollm.hub_models.names import folder_label
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan


def run_evaluation(config: EvaluationConfig, context: Context) -> dict[str, Any]:
    """Train or load the judges, judge every clip, write scores and clips, return the main figures."""
    from audiollm.evaluate.speech.run import evaluate_speech

    return evaluate_speech(config, context)


def plan_evaluation(config: EvaluationConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Measured on 2 cores: 0.05 s per training step of a judge on clips of half a second, 25 s for the rest."""
    recognizer = POCKETSPHINX if config.recognizer is None else folder_label(config.recognizer)
    return StagePlan(
        parameters=2 * 157_000,
        memory_mb=1_000,
        disk_mb=2,
        core_seconds=25 + 2 * 0.05 * config.judge_steps,
        note=f"two judges trained on real takes, and {recognizer}",
    )


STAGE = Stage(
    kind="evaluate",
    config=EvaluationConfig,
    run=run_evaluation,
    artifacts={"scores": "scores.json", "clips": "clips.jsonl"},
    help="have independent judges score generated audio against real recordings",
    plan=plan_evaluation,
)
