"""The stage `fit_mel_pca` and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from tokenizer.mel_pca.settings import FitMelPCAConfig


def _run_fit(config: FitMelPCAConfig, context: Context) -> dict[str, Any]:
    from tokenizer.mel_pca.run import fit_mel_pca

    return fit_mel_pca(config, context)


def _plan_fit(config: FitMelPCAConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    numbers = 4 * config.channels * config.num_mels
    clips = max((plan.facts.get("samples", 0.0) for plan in plans.values()), default=0.0)
    return StagePlan(
        memory_mb=1900 + numbers**2 * 8 * 4 / 2**20,
        disk_mb=numbers * (config.latent_dim + 1) * 4 / 2**20 + 2,
        core_seconds=8 + 0.1 * min(config.max_clips, clips) if clips else None,
        note=f"at most {config.max_clips} clips are read once",
    )


FIT_MEL_PCA = Stage(
    kind="fit_mel_pca",
    config=FitMelPCAConfig,
    run=_run_fit,
    artifacts={"checkpoint": "model", "examples": "examples.json"},
    help="fit a linear autoencoder of sounds in closed form: components of log-mel frames",
    plan=_plan_fit,
)
