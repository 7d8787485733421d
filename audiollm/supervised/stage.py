"""The stage `train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from audiollm.train.supervised_settings import TrainConfig


def _train(config: TrainConfig, context: Context) -> dict[str, Any]:
    from audiollm.supervised.run import train_model  # here: it imports torch

    return train_model(config, context)


def _plan(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.families.registry import packed_training

    training = packed_training(config)
    if training is not None:
        return training.plan(plans)
    from audiollm.supervised.answers.planning import plan_answers

    return plan_answers(config, plans)


STAGE = Stage(
    kind="train",
    config=TrainConfig,
    run=_train,
    artifacts={"checkpoint": "model"},
    help="train a model on samples: one from scratch, or one to go on from, of any family",
    plan=_plan,
    all_ranks=True,
)
