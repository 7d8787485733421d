"""The stage `train_policy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.rewards.catalog import source_facts


def _run(config: PolicyTrainingConfig, context: Context) -> dict[str, Any]:
    from audiollm.rl.online.run import train_policy

    return train_policy(config, context)


def _plan(config: PolicyTrainingConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    answers = (config.batch_size or 0) * config.group_size
    note = f"{config.budget_text()}, {config.batch_size} prompts a step, {answers} answers"
    return StagePlan(seconds=config.minutes * 60 if config.minutes else None, note=note)


def _facts(config: PolicyTrainingConfig) -> list[str]:
    return source_facts(config.reward_terms)


STAGE = Stage(
    kind="train_policy",
    config=PolicyTrainingConfig,
    run=_run,
    artifacts={"checkpoint": "model", "rollouts": "rollouts"},
    help="train a model on its own fresh answers, by their rewards (GRPO, RLOO, PPO, ...)",
    plan=_plan,
    all_ranks=True,
    facts=_facts,
)
