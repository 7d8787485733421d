"""The plan of `train_policy`: who is where, memory of each device, seconds of a step by phase.

Everything is an estimate, from sizes, settings and the files of models alone. Its rules stand beside the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.families.family import ModelFolder
from audiollm.families.model_sizes import (
    ASSUMED_CLIP_S,
    TEXT_ROWS,
    frozen_bytes,
    num_parameters,
    num_records,
)
from audiollm.families.registry import family_of, open_model_folder
from audiollm.files.atomic import read_json
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import ON_THIS_MACHINE, StagePlan, planned_fact, required
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.placement.settings import ActorShare, PlacementChoice
from audiollm.rl.preference.planning import ADAPTER_SHARE
from audiollm.rl.rewards.settings import ModelSettings

ROWS_PER_SECOND = 25.0
"""Positions of a prompt per second that is heard, assumed."""
TEXT_ANSWER_SHARE = 0.4
"""Length of an answer in words over the longest that is allowed, on average, for the time of small models."""
DELAY_ROWS = 8
"""Rows that the delay pattern adds to speech."""
MET_SHARE = 0.6
"""Share of a DualFFN's parameters that a position meets: one of the two feed-forwards, and few rows of the tables."""
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
    if config.server:
        note += f"; time and memory of rollouts are those of our engine, {config.server}'s are not known"
    seconds = config.budget_seconds()
    model = _model(config.start, plans)
    if model is None:
        return StagePlan(seconds=seconds, note=f"{note}; its model is not there yet")
    planned = _planned(config, model, plans)
    on_this_machine = config.size in ON_THIS_MACHINE
    rates, timed = CPU if on_this_machine else GPU, planned
    if on_this_machine and config.answer == "text":
        timed = replace(planned, answer_length=math.ceil(TEXT_ANSWER_SHARE * planned.answer_length))

    def seconds_on(devices: int, tflops: float) -> float:
        """Seconds of all steps."""
        return (steps or 0) * sum(step_seconds(timed, devices, tflops, rates).values())

    states = MOMENT_BYTES * model.parameters * planned.trained_share
    return StagePlan(
        parameters=model.parameters,
        tokens=(steps or 0) * planned.trained_positions,
        memory_mb=memory_mb(planned, 1),
        memory_mb_on=partial(memory_mb, planned),
        disk_mb=(WEIGHT_BYTES * model.parameters + 2 * states) / 2**20,
        seconds=seconds,
        seconds_on=None if seconds or not steps else seconds_on,
        sound_s=(steps or 0) * planned.prompts * _clip_seconds(config, plans),
        note=note,
        details=partial(described, timed, rates=rates),
    )


def _planned(
    config: PolicyTrainingConfig, model: PlannedModel, plans: Mapping[str, StagePlan]
) -> PlannedTraining:
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
    return PlannedTraining(
        model=model,
        trained_share=ADAPTER_SHARE if is_adapter else 1.0,
        frozen_bytes=frozen_bytes(config.frozen_weights),
        prompts=required(config.batch_size),
        group_size=config.group_size,
        prompt_length=TEXT_ROWS + _clip_seconds(config, plans) * ROWS_PER_SECOND,
        answer_length=lengths.get(config.answer, sum(lengths.values())),
        updates=config.updates,
        max_tokens=required(config.max_tokens),
        shares_prompt=opened.shares_prompt,
        met_share=MET_SHARE if opened.shares_prompt else 1.0,
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


def _model(folder: Path, plans: Mapping[str, StagePlan]) -> PlannedModel | None:
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


def _sized(parameters: int, config: Mapping[str, Any]) -> PlannedModel:
    """The sizes of the language model in a config.json, which audio LLMs keep one or two levels down."""
    inside = _language_model(config)
    if inside is None:
        return PlannedModel(parameters)
    width, heads = int(inside["hidden_size"]), int(inside.get("num_attention_heads") or 1)
    head = int(inside.get("head_dim") or width // heads)
    cached = 2 * head * int(inside.get("num_key_value_heads") or heads)
    return PlannedModel(parameters, int(inside["num_hidden_layers"]), width, cached)


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in ("text_config", "thinker_config"):
        if isinstance(config.get(key), Mapping):
            return _language_model(config[key])
    return config if {"hidden_size", "num_hidden_layers"} <= config.keys() else None


OWN_MB = 700
"""Python, torch, and the context of a device."""
MOMENT_BYTES, WEIGHT_BYTES = 8, 4
"""Bytes of a parameter in float32: the two moments of AdamW; the weight, and as many for its gradient."""
GATHERED_SHARE = 0.1
"""Assumed share of a model that FSDP2 and ZeRO 3 gather at a time."""
KEPT_VALUES = 24
"""Values that the backward pass keeps, per position and layer, in hidden sizes (as in the plan of `train`)."""
SHARDED = ("fsdp2", "zero3")


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device does what is not products of large matrices."""

    read_bytes: float
    """Bytes of weights per second, read for the next token of all answers together."""
    step_s: float
    """Seconds that the engine takes for each next token beside that."""
    sent_bytes: float
    """Bytes of weights per second from a rank to its actors, or gathered over the ranks."""
    basis: str


# a DualFFN of 8.9 M parameters on one core of an AMD EPYC, 2026-11-24: 19 ms for a next token of 32 answers, of which
# their products are 12 ms; 0.67 GB of weights per second through buckets, before Ray carries them
CPU = DeviceRates(8e9, 6e-3, 0.4e9, "the last measured on a CPU, the first assumed")
GPU = DeviceRates(1.7e12, 15e-3, 2e9, "assumed for an H100: half of its bandwidth, 2 GB/s to actors")


@dataclass(frozen=True)
class PlannedModel:
    """A model as far as its files tell."""

    parameters: int
    layers: int = 0
    hidden_size: int = 0
    """0 where config.json does not tell, or is not there yet."""
    cached_size: int = 0
    """Keys and values of a position and layer, together."""


@dataclass(frozen=True)
class PlannedTraining:
    """A `train_policy` stage in numbers."""

    model: PlannedModel
    trained_share: float
    """Share of the parameters that are trained."""
    prompts: int
    """Of a step, over all ranks."""
    group_size: int
    prompt_length: float
    """Positions of a prompt, assumed."""
    answer_length: int
    """Positions of an answer, at its longest."""
    updates: int
    max_tokens: int
    """Positions in memory at a time."""
    shares_prompt: bool
    """Whether the rows of a prompt are computed once for its group in training (a DualFFN)."""
    slots: int
    """Most answers that the engine samples at a time."""
    met_share: float = 1.0
    """Share of the parameters of policy, reference and critic whose operations a position takes."""
    reference: int = 0
    """Parameters of a reference of its own; 0: none, or the policy with its adapter off."""
    reads_reference: bool = False
    critic: int = 0
    """Parameters of the critic; 0: none."""
    rewards: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the rewards' models by name; 0 for a rule."""
    reward_parameters: int = 0
    """Parameters of those that are on a training rank's device, where no actors have them."""
    unknown_rewards: tuple[str, ...] = ()
    """Rewards whose time is not known: functions of a user's own, judges, recognizers."""
    frozen_bytes: float = WEIGHT_BYTES
    """Bytes of a parameter of policy or critic that is not trained."""
    value_bytes: int = 4
    """Bytes of an activation."""
    strategy: str = "auto"
    samples_ahead: bool = False
    """Whether a second process of each rank samples for the next step while the current one trains."""
    placement: PlacementChoice = field(default_factory=PlacementChoice)

    @property
    def trained_positions(self) -> float:
        """Positions of a step that go through the model in one pass, over all ranks."""
        prompts = self.prompts * (1 if self.shares_prompt else self.group_size)
        return prompts * self.prompt_length + self.prompts * self.group_size * self.answer_length


def memory_mb(plan: PlannedTraining, devices: int) -> float:
    """Estimate the memory of a training rank's device, in MB."""
    total = _trained_bytes(plan, plan.model.parameters, plan.trained_share, devices)
    if plan.critic:
        total += _trained_bytes(plan, plan.critic, plan.trained_share, devices)
    if "reference" not in plan.placement.shares:
        total += WEIGHT_BYTES * plan.reference
    if "reward" not in plan.placement.shares:
        total += WEIGHT_BYTES * plan.reward_parameters
    layers, width = plan.model.layers, plan.model.hidden_size
    total += plan.max_tokens * layers * width * KEPT_VALUES * plan.value_bytes
    if "rollout" not in plan.placement.shares:
        total += _cache_bytes(plan, devices)
        if plan.samples_ahead:
            total += OWN_MB * 2**20 + WEIGHT_BYTES * plan.model.parameters  # the second process
        if devices > 1 and plan.strategy in (*SHARDED, "zero2"):
            total += WEIGHT_BYTES * plan.model.parameters  # the whole copy that samples
    return OWN_MB + total / 2**20


def actor_memory_mb(plan: PlannedTraining, role: str) -> float:
    """Estimate the memory of an actor, in MB."""
    share = plan.placement.shares[role]
    if role == "rollout":
        model_bytes = WEIGHT_BYTES * plan.model.parameters + _cache_bytes(plan, share.actors)
    elif role == "reference":
        model_bytes = WEIGHT_BYTES * (plan.reference or plan.model.parameters)
    else:
        model_bytes = WEIGHT_BYTES * max(plan.rewards.values(), default=0)
    return OWN_MB + model_bytes / 2**20


def step_seconds(plan: PlannedTraining, devices: int, tflops: float, rates: DeviceRates) -> dict[str, float]:
    """Estimate the seconds of a step by phase; phases that do not occur are left out.

    Args:
        devices: training ranks.
        tflops: operations per second of a device, in 10^12; an actor is taken to reach as many, times its share of a
            GPU where it has less than one.
    """
    speed = 1e12 * tflops
    positions = plan.trained_positions * plan.met_share
    passes = positions * 2 * plan.model.parameters
    samplers = _count(plan, "rollout", devices)
    seconds = {"rollout": _rollout_seconds(plan, samplers, speed * _device_share(plan, "rollout"), rates)}
    scored = plan.prompts * plan.group_size * (plan.prompt_length + plan.answer_length)
    if work := sum(2 * size * scored for size in plan.rewards.values()):
        seconds["reward"] = work / (_count(plan, "reward", devices) * speed * _device_share(plan, "reward"))
    old = passes / (devices * speed)
    reference = 2 * (plan.reference or plan.model.parameters) * positions
    beside = 0.0
    if plan.reads_reference:
        beside = reference / (_count(plan, "reference", devices) * speed * _device_share(plan, "reference"))
    if "reference" in plan.placement.shares:
        seconds["score"] = max(old, beside)  # at the same time
    else:
        seconds["score"] = old + beside
    seconds["score"] += 2 * plan.critic * positions / (devices * speed)
    # backward to the activations always; to the weights where they are trained
    backward = 2 + plan.trained_share
    seconds["update"] = plan.updates * passes * backward / (devices * speed)
    seconds["update"] += plan.updates * 2 * plan.critic * positions * backward / (devices * speed)
    sent = 0.0
    if devices > 1 and plan.strategy in (*SHARDED, "zero2"):
        sent += WEIGHT_BYTES * plan.model.parameters
    if "rollout" in plan.placement.shares:
        sent += WEIGHT_BYTES * plan.model.parameters * (samplers / devices)
    if sent:
        seconds["weights"] = sent / rates.sent_bytes
    if plan.samples_ahead:
        beside = sum(seconds.values()) - seconds["rollout"]
        seconds["rollout"] = max(0.0, seconds["rollout"] - beside)  # what a step still waits for it
    return seconds


def described(plan: PlannedTraining, devices: int, tflops: float, rates: DeviceRates) -> list[str]:
    """Describe layout, memory and the time of a step by phase, a line each."""
    with_ranks = ["policy"]
    if plan.critic:
        with_ranks.append("critic")
    if "rollout" not in plan.placement.shares:
        with_ranks.append(
            "rollouts (a step ahead, in a second process)" if plan.samples_ahead else "rollouts"
        )
    if plan.reads_reference and "reference" not in plan.placement.shares:
        with_ranks.append("reference" if plan.reference else "reference (the policy with its adapter off)")
    if "reward" not in plan.placement.shares:
        with_ranks.append("rewards")
    ranks = f"{devices} training rank{'s' * (devices > 1)}"
    lines = [f"{ranks}: {', '.join(with_ranks)}; {_gigabytes(memory_mb(plan, devices))} a device"]
    for role, share in plan.placement.shares.items():
        lines.append(_actors(plan, role, share, devices))
    seconds = step_seconds(plan, devices, tflops, rates)
    phases = ", ".join(f"{phase} {_format_step_seconds(spent)}" for phase, spent in seconds.items())
    lines.append(f"a step: {_format_step_seconds(sum(seconds.values()))} = {phases}")
    if plan.unknown_rewards:
        lines.append(f"not in it: the time of {', '.join(plan.unknown_rewards)}")
    lines.append(
        f"basis: {plan.prompts} prompts of {plan.prompt_length:.0f} positions (assumed), {plan.group_size} answers to "
        f"each of {plan.answer_length} tokens (assumed); 2 operations per weight and position, 4 to 6 with gradients, "
        f"of {plan.met_share:.0%} of the weights, at {tflops:.3g} TFLOP/s; a next token reads those weights "
        f"({rates.read_bytes / 1e9:g} GB/s) and takes {1e3 * rates.step_s:g} ms beside ({rates.basis})"
    )
    return lines


def _actors(plan: PlannedTraining, role: str, share: ActorShare, devices: int) -> str:
    cpus = f"{share.cpus:g} CPU{'s' * (share.cpus != 1)}"
    gpus = f" and {share.gpus:g} GPU" if share.gpus else ""
    text = f"{share.actors} {role} actor{'s' * (share.actors > 1)}, each {cpus}{gpus}: "
    text += f"{_gigabytes(actor_memory_mb(plan, role))} each"
    if 0 < share.gpus < 1:
        max_actors = int(1 / share.gpus + 1e-6)
        text += f", up to {max_actors} on a GPU"
    if share.actors % devices:
        text += f" (REFUSED: not a multiple of {devices} ranks)"
    return text


def _trained_bytes(plan: PlannedTraining, parameters: int, share: float, devices: int) -> float:
    """Weights, gradients and moments of a model, as the strategy spreads them."""
    weights = WEIGHT_BYTES * parameters
    gradients, moments = WEIGHT_BYTES * parameters * share, MOMENT_BYTES * parameters * share
    if devices == 1 or plan.strategy in ("auto", "ddp"):
        return share * weights + (1 - share) * plan.frozen_bytes * parameters + gradients + moments
    if plan.strategy == "zero2":
        return weights + (gradients + moments) / devices
    return (weights + gradients + moments) / devices + GATHERED_SHARE * weights


def _cache_bytes(plan: PlannedTraining, samplers: int) -> float:
    """Keys and values of the answers that are sampled at a time, in float32."""
    answers = min(plan.slots, math.ceil(plan.prompts / samplers) * plan.group_size)
    positions = answers * (plan.prompt_length + plan.answer_length)
    return positions * plan.model.layers * plan.model.cached_size * 4


def _rollout_seconds(plan: PlannedTraining, samplers: int, speed: float, rates: DeviceRates) -> float:
    prompts = math.ceil(plan.prompts / samplers)
    answers = prompts * plan.group_size
    read = prompts * (1 if plan.shares_prompt else plan.group_size) * plan.prompt_length
    met_parameters = plan.met_share * plan.model.parameters
    prefill = 2 * met_parameters * read / speed
    together = min(plan.slots, answers)
    token = max(WEIGHT_BYTES * met_parameters / rates.read_bytes, 2 * met_parameters * together / speed)
    return prefill + math.ceil(answers / together) * plan.answer_length * (token + rates.step_s)


def _count(plan: PlannedTraining, role: str, devices: int) -> int:
    share = plan.placement.shares.get(role)
    return devices if share is None else share.actors


def _device_share(plan: PlannedTraining, role: str) -> float:
    """The share of a device that an actor has; a training rank has a whole one."""
    share = plan.placement.shares.get(role)
    return 1.0 if share is None or not 0 < share.gpus < 1 else share.gpus


def _gigabytes(mb: float) -> str:
    return f"{mb * 2**20 / 1e9:.1f} GB"


def _format_step_seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
