"""The stage `train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.supervised.settings import TrainConfig


def _run(config: TrainConfig, context: Context) -> dict[str, Any]:
    from audiollm.supervised.run import train_model

    return train_model(config, context)


def _plan(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.supervised.planning import plan_training  # here: it imports torch

    return plan_training(config, plans)


STAGE = Stage(
    kind="train",
    config=TrainConfig,
    run=_run,
    artifacts={"checkpoint": "model"},
    help="train the DualFFN decoder on the shards",
    plan=_plan,
    all_ranks=True,
)
