"""The plan of `train` on a published model that answers in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from audiollm.families.model_sizes import num_records, planned_parameters
from audiollm.recipe.stages import StagePlan, planned_fact, required
from audiollm.supervised.answers.run import check_settings
from audiollm.supervised.settings import TrainConfig

BASE_MB = 700
"""Python, torch, and the context of a device."""
TRAINED_BYTES, FROZEN_BYTES = 16, 4
"""Bytes of a parameter in float32: with gradient and two moments of AdamW, and without."""
ADAPTER_SHARE = 0.02
"""Assumed share of an adapter's parameters in those of its model."""
ANSWER_ROWS = 200.0
"""Positions of a sample, assumed: a recording of some seconds, a question and an answer."""


def plan_answers(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Estimate from the sizes of the model's files; activations, which the samples' lengths decide, are left out.

    Raises:
        ConfigError: a setting that the model has no use for.
    """
    check_settings(config)
    batch_size = required(config.batch_size)
    records = sum(
        planned_fact(plans, Path(source.path), "samples") or num_records(source.path)
        for source in config.samples
    )
    steps = config.steps_for(records / batch_size) if records else config.steps
    note = f"{config.budget_text()}, {batch_size} samples a step"
    parameters = planned_parameters(required(config.start), plans)
    trained = parameters * (ADAPTER_SHARE if config.trained == "adapter" else 1.0)
    seconds = config.budget_seconds()
    return StagePlan(
        parameters=parameters,
        memory_mb=BASE_MB + (trained * TRAINED_BYTES + (parameters - trained) * FROZEN_BYTES) / 1e6,
        disk_mb=(parameters * FROZEN_BYTES + 2 * trained * (TRAINED_BYTES - FROZEN_BYTES)) / 1e6,
        seconds=seconds,
        flops=0.0 if seconds else 6.0 * parameters * (steps or 0) * batch_size * ANSWER_ROWS,
        note=note,
    )
