"""The stage `train_preference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.plug_ins import plug_in_facts
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.rl.critic.settings import CRITIC_ARTIFACT
from audiollm.rl.preference.settings import PreferenceConfig


def _run_preference_training(config: PreferenceConfig, context: Context) -> dict[str, Any]:
    from audiollm.rl.preference.run import train_preference

    return train_preference(config, context)


def _plan_preference_training(config: PreferenceConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.rl.preference.planning import plan_answer_training  # here: it reads the model's folder

    has_critic = config.critic is not None
    return plan_answer_training(config, plans, config.needs_reference, has_critic, config.pictures)


STAGE = Stage(
    kind="train_preference",
    config=PreferenceConfig,
    run=_run_preference_training,
    artifacts={"checkpoint": "model"},
    help="train a model on answers that were judged better and worse",
    plan=_plan_preference_training,
    all_ranks=True,
    more_artifacts=lambda config: {} if config.critic is None else CRITIC_ARTIFACT,
    facts=lambda config: plug_in_facts(choice.name for choice in config.objective),
)
