"""The plan of `train_policy`: what its settings, and the files of its models, tell `rl.placement.planning`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.families.family import ModelFolder
from audiollm.families.model_sizes import ASSUMED_CLIP_S, TEXT_ROWS, num_parameters, num_records
from audiollm.families.registry import family_of, open_model_folder
from audiollm.files.atomic import read_json
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan, planned_fact, required
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.placement import planning
from audiollm.rl.placement.settings import PlacementChoice
from audiollm.rl.preference.planning import ADAPTER_SHARE
from audiollm.rl.rewards.settings import ModelSettings

ROWS_PER_SECOND = 25.0
"""Positions of a prompt per second that is heard, assumed."""
TEXT_ANSWER_SHARE = 0.4
"""Length of an answer in words over the longest that is allowed, on average, for the time of models of size tiny."""
DELAY_ROWS = 8
"""Rows that the delay pattern adds to speech."""
UNTIMED_REWARDS = ("judge", "words", "voice", "quality")
"""Built-in rewards whose time their sizes do not tell: endpoints, recognizers, voice encoders."""


def plan_policy_training(config: PolicyTrainingConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Estimate a training; where its model is not there yet and no stage makes it, steps alone are known."""
    batch = required(config.batch_size)
    records = sum(
        planned_fact(plans, Path(source.path), "samples") or num_records(source.path)
        for source in config.samples
    )
    steps = config.steps_for(records / batch) if records else config.steps
    note = f"{config.budget_text()}, {batch} prompts a step, {batch * config.group_size} answers"
    if config.steps is None:
        note += f", {steps} steps" if steps else ", its samples are not there yet"
    seconds = config.budget_seconds()
    model = _model(config.start, plans)
    if model is None:
        return StagePlan(seconds=seconds, note=f"{note}; its model is not there yet")
    planned = _planned(config, model, plans)
    rates = planning.CPU if config.size == "tiny" else planning.GPU
    timed = planned
    if config.size == "tiny" and config.answer == "text":
        timed = replace(planned, answer_length=math.ceil(TEXT_ANSWER_SHARE * planned.answer_length))

    def seconds_on(devices: int, tflops: float) -> float:
        """Seconds of all steps."""
        return (steps or 0) * sum(planning.step_seconds(timed, devices, tflops, rates).values())

    states = planning.MOMENT_BYTES * model.parameters * planned.trained_share
    return StagePlan(
        parameters=model.parameters,
        tokens=(steps or 0) * planned.trained_positions,
        memory_mb=planning.memory_mb(planned, 1),
        memory_mb_on=partial(planning.memory_mb, planned),
        disk_mb=(planning.WEIGHT_BYTES * model.parameters + 2 * states) / 2**20,
        seconds=seconds,
        seconds_on=None if seconds or not steps else seconds_on,
        note=note,
        details=partial(planning.described, timed, rates=rates),
    )


def _planned(
    config: PolicyTrainingConfig, model: planning.PlannedModel, plans: Mapping[str, StagePlan]
) -> planning.PlannedTraining:
    opened = _opened(config.start)
    is_adapter = config.trained == "adapter"
    own_reference = config.needs_reference and (not is_adapter or config.refresh_reference is not None)
    sizes = {
        term.name: _parameters(term.settings.folder, plans) if isinstance(term.settings, ModelSettings) else 0
        for term in config.reward_terms
    }
    on_cpu = [term.name for term in config.reward_terms if getattr(term.settings, "device", "") == "cpu"]
    critic = 0
    if config.critic is not None:
        critic = _parameters(config.critic.start or config.start, plans)
    lengths = {"text": config.max_answer_tokens, "audio": config.max_frames + DELAY_ROWS}
    return planning.PlannedTraining(
        model=model,
        trained_share=ADAPTER_SHARE if is_adapter else 1.0,
        prompts=required(config.batch_size),
        group_size=config.group_size,
        prompt_length=TEXT_ROWS + _clip_seconds(config, plans) * ROWS_PER_SECOND,
        answer_length=lengths.get(config.answer, sum(lengths.values())),
        updates=config.updates,
        max_tokens=required(config.max_tokens),
        shares_prompt=opened.shares_prompt,
        slots=opened.rollout_slots,
        reference=_parameters(config.reference or config.start, plans) if own_reference else 0,
        reads_reference=config.needs_reference,
        critic=critic,
        rewards=sizes,
        reward_parameters=sum(
            size for name, size in sizes.items() if config.size == "tiny" or name not in on_cpu
        ),
        unknown_rewards=tuple(
            term.name for term in config.reward_terms if term.is_plug_in or term.name in UNTIMED_REWARDS
        ),
        value_bytes=4 if config.precision == "fp32" else 2,
        strategy=config.strategy,
        samples_ahead=bool(config.ahead),
        placement=config.placement or PlacementChoice(),
    )


def _clip_seconds(config: PolicyTrainingConfig, plans: Mapping[str, StagePlan]) -> float:
    """The mean length of the recordings in the prompts, where the stages that make them tell it."""
    paths = [Path(source.path) for source in config.samples]
    clips, seconds = (sum(planned_fact(plans, path, fact) for path in paths) for fact in ("clips", "audio_s"))
    return seconds / clips if clips else ASSUMED_CLIP_S


def _model(folder: Path, plans: Mapping[str, StagePlan]) -> planning.PlannedModel | None:
    """A model by the stage that makes it, or by its files; None: neither is there."""
    making_stage = _find_making_stage(folder, plans)
    if making_stage is not None:
        return _sized(making_stage.parameters, making_stage.model or {}) if making_stage.parameters else None
    parameters = num_parameters(folder)
    if not parameters:
        return None
    return _sized(parameters, read_json(model_folder(folder) / "config.json"))


def _parameters(folder: Path, plans: Mapping[str, StagePlan]) -> int:
    making_stage = _find_making_stage(folder, plans)
    return num_parameters(folder) if making_stage is None else making_stage.parameters


def _find_making_stage(folder: Path, plans: Mapping[str, StagePlan]) -> StagePlan | None:
    """The plan of the stage that makes a folder."""
    return next((plan for plan in plans.values() if folder in plan.artifacts.values()), None)


def _opened(folder: Path) -> ModelFolder:
    """Open a model's folder; one that is not there yet is of the kind that `train` makes."""
    try:
        return open_model_folder(folder)
    except (ConfigError, OSError):
        return family_of("audiollm_dual_ffn", folder).open(folder)


def _sized(parameters: int, config: Mapping[str, Any]) -> planning.PlannedModel:
    """The sizes of the language model in a config.json, which audio LLMs keep one or two levels down."""
    inside = _language_model(config)
    if inside is None:
        return planning.PlannedModel(parameters)
    width, heads = int(inside["hidden_size"]), int(inside.get("num_attention_heads") or 1)
    head = int(inside.get("head_dim") or width // heads)
    cached = 2 * head * int(inside.get("num_key_value_heads") or heads)
    return planning.PlannedModel(parameters, int(inside["num_hidden_layers"]), width, cached)


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in ("text_config", "thinker_config"):
        if isinstance(config.get(key), Mapping):
            return _language_model(config[key])
    return config if {"hidden_size", "num_hidden_layers"} <= config.keys() else None
