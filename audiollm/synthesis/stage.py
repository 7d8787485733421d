"""The stage `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.synthesis.settings import GenerateConfig

SECONDS_PER_CLIP = 0.15
"""Core-seconds of a clip of a few words that a model of size tiny speaks."""


def _run_generation(config: GenerateConfig, context: Context) -> dict[str, Any]:
    from audiollm.synthesis.run import generate_prompts

    return generate_prompts(config, context)


def _plan_generation(config: GenerateConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    clips = config.max_prompts * config.takes
    return StagePlan(
        tokens=clips * 60.0,
        memory_mb=1500,
        disk_mb=clips * 0.05,
        core_seconds=5 + 0.15 * clips,
        note=f"at most {clips} clips",
    )


STAGE = Stage(
    kind="generate",
    config=GenerateConfig,
    run=_run_generation,
    artifacts={"audio": "generated.jsonl"},
    help="speak the held-out prompts",
    plan=_plan_generation,
)
