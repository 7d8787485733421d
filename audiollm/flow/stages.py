"""The stages `encode_latents`, `train_flow`, `generate_sound` and `edit_sounds`, and their plans. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from audiollm.flow.settings import EditSoundsConfig, EncodeLatentsConfig, GenerateSoundConfig, TrainFlowConfig
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, required

ROWS_PER_SECOND = 15.6
"""Latents of a sound per second, as `fit_mel_pca` makes them."""
ASSUMED_ROWS = 300.0
"""Latents of a sound whose length is not known yet."""
SECONDS_PER_SOUND = 0.15
"""Core-seconds to encode a sound of a few seconds with its words and pictures; with AMX 0.10 (660 sounds in 28
CPU-seconds of a core that is 2.3 times as fast with sound, 2026-11-29)."""
SECONDS_PER_MADE_SOUND = 2.0
"""Core-seconds to make or edit a sound of a few seconds."""


def _encode(config: EncodeLatentsConfig, context: Context) -> dict[str, Any]:
    from audiollm.flow.encoding import encode_latents

    return encode_latents(config, context)


def _run_train_flow(config: TrainFlowConfig, context: Context) -> dict[str, Any]:
    from audiollm.flow.training import train_flow

    return train_flow(config, context)


def _generate(config: GenerateSoundConfig, context: Context) -> dict[str, Any]:
    from audiollm.flow.generate import generate_sounds

    return generate_sounds(config, context)


def _run_edit_sounds(config: EditSoundsConfig, context: Context) -> dict[str, Any]:
    from audiollm.flow.scene_edits import edit_sounds

    return edit_sounds(config, context)


def _plan_encode(config: EncodeLatentsConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    samples, seconds = (_sum_planned_fact(plans, [config.samples], name) for name in ("samples", "seconds"))
    side, rate = config.pictures.frame_side, config.pictures.frame_rate
    pictures = seconds * (rate * side**2 + config.pictures.sync_rate * config.pictures.sync_side**2) * 6
    rows = samples * (1 + config.edits_per_sample)
    return StagePlan(
        memory_mb=1500,
        disk_mb=(1 + config.edits_per_sample) * pictures / 2**20 + rows * 0.03,
        core_seconds=2 + SECONDS_PER_SOUND * rows if rows else None,
        facts={"samples": rows, "seconds": seconds * (1 + config.edits_per_sample)},
        note=f"{rows:.0f} sounds" if rows else "",
    )


def flow_parameters(config: TrainFlowConfig) -> int:
    """Parameters of the transformer with all modalities, on the meta device."""
    import torch

    from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig
    from audiollm.flow.model.thinksound import ThinkSound, ThinkSoundConfig

    width, heads = required(config.hidden_size), required(config.num_heads)
    multi, single = required(config.multi_stream_blocks), required(config.single_stream_blocks)
    with torch.device("meta"):
        model: torch.nn.Module = (
            MMDiT(
                MMDiTConfig(
                    hidden_size=width,
                    num_heads=heads,
                    multi_stream_blocks=multi,
                    single_stream_blocks=single,
                    audio_context=config.audio_context,
                    gated_fusion=config.gated_fusion,
                    estimate_variance=config.estimate_variance,
                )
            )
            if config.preset == "native"
            else ThinkSound(
                ThinkSoundConfig(hidden_size=width, depth=multi + single, fused_depth=single, num_heads=heads)
            )
        )
    return sum(parameter.numel() for parameter in model.parameters())


def _plan_train_flow(config: TrainFlowConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    parameters, batch = flow_parameters(config), required(config.batch_size)
    sounds = _sum_planned_fact(plans, [latents.path for latents in config.samples], "samples")
    steps = config.steps_for(sounds / batch) or 0
    seconds = _sum_planned_fact(plans, [latents.path for latents in config.samples], "seconds")
    rows = batch * (seconds / sounds * ROWS_PER_SECOND if sounds else ASSUMED_ROWS)
    memory = partial(_train_memory_mb, config, parameters, rows)
    return StagePlan(
        parameters=parameters,
        tokens=steps * rows,
        flops=6.0 * parameters * steps * rows,
        gradient_bytes=4.0 * parameters * steps,
        sound_s=steps * rows / ROWS_PER_SECOND,
        memory_mb=memory(1),
        memory_mb_on=memory,
        disk_mb=parameters * (3 * 16 + 4) / 2**20,  # three checkpoints while one is replaced, and the model
        seconds=config.budget_seconds(),
        note=config.budget_text(),
    )


def _train_memory_mb(config: TrainFlowConfig, parameters: int, rows: float, devices: int) -> float:
    """Memory of a device: weights, gradients, Adam's states and averages in fp32, and its share of the activations.

    FSDP2 holds 1 / devices of the former. The least is the whole model, which each device has when training begins.
    """
    blocks = required(config.multi_stream_blocks) + required(config.single_stream_blocks)
    states = parameters * 20.0
    if config.strategy == "fsdp2":
        states = max(states / devices, parameters * 4.0)
    activations = rows / devices * required(config.hidden_size) * blocks * 120
    return 1200 + (states + activations) / 2**20


def _sum_planned_fact(plans: Mapping[str, StagePlan], paths: Sequence[Path], fact: str) -> float:
    """The sum of a fact over the planned stages that make these files or folders."""
    makers = [plan for plan in plans.values() if set(paths) & set(plan.artifacts.values())]
    return sum(plan.facts.get(fact, 0.0) for plan in makers)


def _plan_generate(config: GenerateSoundConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    sounds = config.max_samples * config.takes
    seconds = 5 + SECONDS_PER_MADE_SOUND * sounds
    return StagePlan(
        memory_mb=1500, disk_mb=sounds * 0.3, core_seconds=seconds, note=f"at most {sounds} sounds"
    )


def _plan_edit(config: EditSoundsConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    by = {"add": len(config.by), "remove": len(config.by)}
    edits = config.max_samples * sum(by.get(operation, 1) for operation in config.operations)
    seconds = 5 + SECONDS_PER_MADE_SOUND * edits
    return StagePlan(memory_mb=1500, disk_mb=edits * 0.6, core_seconds=seconds, note=f"at most {edits} edits")


ENCODE_LATENTS = Stage(
    kind="encode_latents",
    config=EncodeLatentsConfig,
    run=_encode,
    artifacts={"shards": "shards"},
    help="encode sounds, words and pictures for flow matching",
    plan=_plan_encode,
)
TRAIN_FLOW = Stage(
    kind="train_flow",
    config=TrainFlowConfig,
    run=_run_train_flow,
    artifacts={"checkpoint": "model"},
    help="train a flow-matching model of sound",
    plan=_plan_train_flow,
    all_ranks=True,
)
GENERATE_SOUND = Stage(
    kind="generate_sound",
    config=GenerateSoundConfig,
    run=_generate,
    artifacts={"audio": "generated.jsonl"},
    help="make sounds from pictures, words and sounds",
    plan=_plan_generate,
)
EDIT_SOUNDS = Stage(
    kind="edit_sounds",
    config=EditSoundsConfig,
    run=_run_edit_sounds,
    artifacts={"audio": "edited.jsonl"},
    help="extend, inpaint, add and remove sounds of scenes",
    plan=_plan_edit,
)
