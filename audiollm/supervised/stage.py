"""The stage `train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.errors import ConfigError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.supervised.settings import TrainConfig


def _train_by_kind(config: TrainConfig, context: Context) -> dict[str, Any]:
    if _is_packed(config):
        from audiollm.supervised.run import train_model

        return train_model(config, context)
    from audiollm.supervised.answers.run import train_on_answers

    return train_on_answers(config, context)


def _plan_by_kind(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    if _is_packed(config):
        from audiollm.supervised.planning import plan_training  # here: it imports torch

        return plan_training(config, plans)
    from audiollm.supervised.answers.planning import plan_answers

    return plan_answers(config, plans)


def _is_packed(config: TrainConfig) -> bool:
    """Whether the model is trained on packs of rows; one that is not there yet is of the kind that `train` makes."""
    from audiollm.families.registry import open_model_folder

    try:
        return config.start is None or open_model_folder(config.start).is_packed
    except ConfigError:
        return True


STAGE = Stage(
    kind="train",
    config=TrainConfig,
    run=_train_by_kind,
    artifacts={"checkpoint": "model"},
    help="train a model on samples: a DualFFN, or a published one to answer in words",
    plan=_plan_by_kind,
    all_ranks=True,
)
