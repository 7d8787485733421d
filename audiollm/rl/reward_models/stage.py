"""The stage `train_reward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.rl.reward_models.settings import RewardConfig


def _run_reward_training(config: RewardConfig, context: Context) -> dict[str, Any]:
    from audiollm.rl.reward_models.run import train_reward

    return train_reward(config, context)


def _plan_reward_training(config: RewardConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.rl.preference.planning import plan_answer_training  # here: it reads the model's folder

    return plan_answer_training(config, plans, has_reference=False)


STAGE = Stage(
    kind="train_reward",
    config=RewardConfig,
    run=_run_reward_training,
    artifacts={"checkpoint": "model"},
    help="train a model that scores answers",
    plan=_plan_reward_training,
    all_ranks=True,
)
