"""The plan of the stage `train` on a model that learns answers through its policy.

Of a family that makes its model without memory (`PlannedFolder`), memory follows from config.json and from the rows of
a batch. Of others it is an estimate from the sizes of the model's files, without activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from audiollm.devices import default_device
from audiollm.errors import ConfigError
from audiollm.families.family import PlannedFolder
from audiollm.families.model_sizes import TEXT_ROWS, frozen_bytes, num_records, planned_parameters
from audiollm.families.registry import open_model_folder
from audiollm.families.training_memory import (
    COMPARED_FORMATS,
    UnloadedModel,
    WeightSizes,
    gpu_mb,
    process_mb,
    smallest_gpu,
)
from audiollm.files.atomic import read_json
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan, planned_fact, required
from audiollm.supervised.answers.run import check_settings
from audiollm.train.loop.optim import compute_dtype, freeze
from audiollm.train.settings import FrozenFormat
from audiollm.train.supervised_settings import TrainConfig

BASE_MB = 700
"""Python, torch, and the context of a device."""
TRAINED_BYTES, FROZEN_BYTES = 16, 4
"""Bytes of a parameter in float32: with gradient and two moments of AdamW, and without."""
ADAPTER_SHARE = 0.02
"""Assumed share of an adapter's parameters in those of a model that is known by its size alone."""
ANSWER_ROWS = 200.0
"""Positions of a sample, assumed: a recording of some seconds, a question and an answer."""


class BatchRows(NamedTuple):
    """The rows of a batch, and the frames of speech among them."""

    rows: float
    frames: float
    is_known: bool
    """Whether the samples are there; otherwise a batch is as full as `max_tokens` lets it be."""


def plan_answers(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Estimate a training from its model's config.json, or from the sizes of the files.

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
    model = _planned_model(config)
    if model is None:
        parameters = planned_parameters(required(config.start), plans)
        trained = parameters * (ADAPTER_SHARE if config.trained == "adapter" else 1.0)
        frozen = (parameters - trained) * frozen_bytes(config.frozen_weights)
        memory_mb = BASE_MB + (trained * TRAINED_BYTES + frozen) / 1e6
        details = None
    else:
        weights = WeightSizes.of(model.root, config.frozen_weights)
        parameters, trained = weights.total, float(weights.trained)
        batch = count_batch_rows(config)
        memory_mb = training_mb(config, model, weights, batch)
        note += f", {trained / 1e6:.1f} M trained"
        details = partial(_memory_lines, config, model, batch)
    seconds = config.budget_seconds()
    return StagePlan(
        parameters=parameters,
        memory_mb=memory_mb,
        disk_mb=(parameters * FROZEN_BYTES + 2 * trained * (TRAINED_BYTES - FROZEN_BYTES)) / 1e6,
        seconds=seconds,
        flops=0.0 if seconds else 6.0 * parameters * (steps or 0) * batch_size * ANSWER_ROWS,
        gradient_bytes=4.0 * trained * (steps or 0),
        note=note,
        details=details,
    )


def count_batch_rows(config: TrainConfig) -> BatchRows:
    """Count the rows of a batch, by the index of the samples where all of them are there."""
    limit, samples, frames = float(required(config.max_tokens)), 0.0, 0.0
    for source in config.samples:
        index = Path(source.path) / "index.json"
        counts = read_json(index).get("counts") if index.is_file() else None
        if not counts or not counts["samples"]:
            return BatchRows(limit, limit, False)
        samples, frames = samples + counts["samples"], frames + counts["frames"]
    at_once = required(config.batch_size) * frames / samples
    rows = min(limit, at_once + required(config.batch_size) * TEXT_ROWS)
    return BatchRows(rows, min(rows, at_once), True)


def training_mb(config: TrainConfig, model: UnloadedModel, weights: WeightSizes, batch: BatchRows) -> float:
    """Estimate the memory of this machine's device: a GPU, or the process where there is none."""
    device, work = default_device(), model.work(batch.rows, batch.frames)
    if device.type == "cuda":
        return _gpu_mb(config, model, weights, batch)
    value_bytes = 4 if compute_dtype(config.precision, device) is None else 2
    activations = work.num_bytes(value_bytes, config.activation_checkpointing)
    return process_mb(weights, activations, bool(config.ema_decay))


def _gpu_mb(config: TrainConfig, model: UnloadedModel, weights: WeightSizes, batch: BatchRows) -> float:
    """Estimate the memory of a GPU, with products in half precision unless the settings say otherwise."""
    is_half, is_recomputed = config.precision != "fp32", config.activation_checkpointing
    activations = model.work(batch.rows, batch.frames).num_bytes(2 if is_half else 4, is_recomputed)
    return gpu_mb(weights, activations, bool(config.ema_decay), is_recomputed, is_half)


def _memory_lines(config: TrainConfig, model: UnloadedModel, batch: BatchRows, *_: float) -> list[str]:
    """Tell the memory of a GPU in each format of frozen weights, and which GPU holds it."""
    formats: list[FrozenFormat] = [*COMPARED_FORMATS]
    if config.trained == "all":
        formats = ["fp32"]
    cells = []
    for format in formats:
        needed_mb = _gpu_mb(config, model, WeightSizes.of(model.root, format), batch)
        cells.append(f"{format} {needed_mb / 1024:.1f} GB ({smallest_gpu(needed_mb)})")
    rows = f"batches of {batch.rows:,.0f} rows" + ("" if batch.is_known else ", max_tokens")
    return [f"memory of a GPU by frozen_weights, {rows}: {', '.join(cells)}"]


def _planned_model(config: TrainConfig) -> UnloadedModel | None:
    """The model without memory; None where it is not there yet, or of a family that plans by the sizes of files."""
    try:
        path = model_folder(required(config.start))
    except ConfigError:
        return None
    folder = open_model_folder(path)
    if not isinstance(folder, PlannedFolder):
        return None
    model = folder.planned_model(config.trained, config.lora if config.trained == "adapter" else None)
    freeze(((f"policy.{name}", parameter) for name, parameter in model.root.named_parameters()), config.rules)
    return model
