"""The plan of a training on judged answers: parameters, memory of a device, steps, disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from audiollm.data.records.video_clips import PictureSettings
from audiollm.families.model_sizes import frozen_bytes, num_records, planned_parameters
from audiollm.recipe.stages import StagePlan, planned_fact, required
from audiollm.rl.preference.settings import AnswerTrainingConfig

OWN_MB = 700
"""Python, torch, and the context of a device."""
TRAINED_BYTES, FROZEN_BYTES = 16, 4
"""Bytes of a parameter in float32: with gradient and two moments of AdamW, and without."""
RECORD_ROWS = 24.0
"""Positions of a record's answers with their share of the prompt, assumed: those of short clips and short answers."""
SEEN_RECORD_ROWS = 550.0
"""Positions of a record about a video beside those of its sound and pictures: a question, an answer, and what decoding
films, both encoders and Muon cost, counted as positions. Fitted to 7.8 CPU-seconds per step of 16 records of
recipes/audiocot_writer/tiny.yaml, where `plan` measured 0.028 TFLOP/s (AMD EPYC with AVX2, load 8)."""
SOUND_ROWS_PER_SECOND = 25.0
PICTURE_PATCH, PICTURES_PER_ROW = 28, 2
"""Sides in pixels of what is one position of a picture, and pictures that share it, in Qwen-Omni's thinkers."""
ASSUMED_CLIP_S, ASSUMED_SIDE = 9.1, 224
"""Length of clips and side of pictures, where neither the settings nor an earlier stage tell them."""
ADAPTER_SHARE = 0.02
"""Assumed share of an adapter's parameters in those of its model."""


def plan_answer_training(
    config: AnswerTrainingConfig,
    plans: Mapping[str, StagePlan],
    has_reference: bool,
    has_critic: bool = False,
    pictures: PictureSettings | None = None,
) -> StagePlan:
    """Estimate from the sizes of the model's files; activations, which the answers' lengths decide, are left out.

    Args:
        pictures: how videos are shown; None: records have none.
    """
    batch = required(config.batch_size)
    records = sum(
        planned_fact(plans, Path(source.path), "samples") or num_records(source.path)
        for source in config.samples
    )
    steps = config.steps_for(records / batch) if records else config.steps
    note = f"{config.budget_text()}, {batch} records a step"
    if steps != config.steps:
        note += f", {steps} steps"
    elif not records:
        note += ", its records are not there yet"
    parameters = planned_parameters(config.start, plans)
    if not parameters:
        return StagePlan(note=f"{note}; its model is not there yet")
    is_adapter = config.trained == "adapter"
    models = 2 if has_critic else 1
    trained = models * parameters * (ADAPTER_SHARE if is_adapter else 1.0)
    frozen = models * parameters - trained + (parameters if has_reference and not is_adapter else 0)
    memory = OWN_MB + (trained * TRAINED_BYTES + frozen * frozen_bytes(config.frozen_weights)) / 1e6
    disk = models * parameters * FROZEN_BYTES / 1e6 + 2 * trained * (TRAINED_BYTES - FROZEN_BYTES) / 1e6
    seconds = config.budget_seconds()
    passes = 6.0 + (2.0 if has_reference else 0.0)
    flops = passes * models * parameters * (steps or 0) * batch * _record_rows(config, plans, pictures)
    return StagePlan(
        parameters=parameters,
        memory_mb=memory,
        disk_mb=disk,
        seconds=seconds,
        flops=0.0 if seconds else flops,
        gradient_bytes=4.0 * trained * (steps or 0),
        note=note,
    )


def _record_rows(
    config: AnswerTrainingConfig, plans: Mapping[str, StagePlan], pictures: PictureSettings | None
) -> float:
    """Positions of a record; of one about a video its pictures and its sound are most of them."""
    if pictures is None:
        return RECORD_ROWS
    clip_s = max(planned_fact(plans, Path(source.path), "clip_s") for source in config.samples)
    patches = math.ceil((pictures.side or ASSUMED_SIDE) / PICTURE_PATCH) ** 2
    rows_per_second = SOUND_ROWS_PER_SECOND + pictures.per_second / PICTURES_PER_ROW * patches
    return SEEN_RECORD_ROWS + (clip_s or ASSUMED_CLIP_S) * rows_per_second
