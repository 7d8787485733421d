"""The stage `train_interpreter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.interpret.training.settings import InterpreterTrainingConfig
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan

SECONDS_PER_STREAM = 0.15
"""Core-seconds to sample a stream of a few seconds and to learn from it, with a model of size tiny."""


def _run_train_interpreter(config: InterpreterTrainingConfig, context: Context) -> dict[str, Any]:
    from audiollm.interpret.training.run import train_interpreter

    return train_interpreter(config, context)


def _plan_train_interpreter(config: InterpreterTrainingConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    streams = (config.batch_size or 0) * config.group_size
    note = f"{config.budget_text()}, {streams} streams a step"
    seconds = config.budget_seconds()
    work_s = None if config.steps is None else 10 + SECONDS_PER_STREAM * config.steps * streams
    return StagePlan(seconds=seconds, core_seconds=work_s, note=note)


STAGE = Stage(
    kind="train_interpreter",
    config=InterpreterTrainingConfig,
    run=_run_train_interpreter,
    artifacts={"checkpoint": "model", "rollouts": "rollouts"},
    help="train an interpreter on its own actions over streams (PPO), by rewards of actions and sequences",
    plan=_plan_train_interpreter,
    all_ranks=True,
    facts=lambda config: config.own_part_facts(),
)
