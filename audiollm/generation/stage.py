"""The stage `generate`: its settings and plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from audiollm.recipe import InputPath, Stage, StageConfig, StagePlan
from audiollm.runner import Context


class GenerateConfig(StageConfig):
    """Settings of `generate`."""

    model: InputPath
    codec: InputPath
    samples: InputPath
    """The samples whose prompts are spoken."""
    prompts: Literal["test", "train"] = "test"
    """The split whose distinct (text, speaker) pairs are spoken."""
    takes: int = Field(3, ge=1)
    """Times each pair is spoken, each with a seed of its own."""
    max_prompts: int = Field(60, ge=1)
    """At most so many pairs, evenly picked."""
    batch_size: int = Field(60, ge=1)
    max_duration_s: float = Field(30.0, gt=0)
    """Nothing is spoken longer; the limit follows the training clips where those are shorter."""
    temperature: float = Field(0.7, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(0.9, gt=0, le=1)
    ras_window: int = Field(0, ge=0)
    """Repetition-aware sampling looks back so many frames (Higgs Audio V2: 7); 0 is none."""
    text_guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance on the text; 1 is none."""
    speaker_guidance: float = Field(2.0, ge=0)
    """Classifier-free guidance on the speaker; 1 is none."""
    seed: int = 0


def _run(config: GenerateConfig, context: Context) -> dict[str, Any]:
    from audiollm.generation.run import generate

    return generate(config, context)


def _plan(config: GenerateConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    clips = config.max_prompts * config.takes
    return StagePlan(tokens=clips * 60.0, memory_mb=1500, disk_mb=clips * 0.05, note=f"at most {clips} clips")


STAGE = Stage(
    kind="generate",
    config=GenerateConfig,
    run=_run,
    artifacts={"audio": "generated.jsonl"},
    help="speak the held-out prompts",
    plan=_plan,
)
