"""The stage `train_policy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.rl.critic.settings import CRITIC_ARTIFACT
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.rewards.catalog import source_facts
from audiollm.rl.rewards.settings import VERDICTS


def _run_policy_training(config: PolicyTrainingConfig, context: Context) -> dict[str, Any]:
    from audiollm.rl.online.run import train_policy

    return train_policy(config, context)


def _plan_policy_training(config: PolicyTrainingConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.rl.online.planning import plan_policy_training  # here: it reads the model's folder

    return plan_policy_training(config, plans)


STAGE = Stage(
    kind="train_policy",
    config=PolicyTrainingConfig,
    run=_run_policy_training,
    artifacts={"checkpoint": "model", "rollouts": "rollouts"},
    help="train a model on its own fresh answers, by their rewards (GRPO, RLOO, PPO, ...)",
    plan=_plan_policy_training,
    all_ranks=True,
    more_artifacts=lambda config: {} if config.critic is None else CRITIC_ARTIFACT,
    facts=lambda config: [*source_facts(config.reward_terms), *config.own_part_facts()],
    keeps=(VERDICTS,),
)
