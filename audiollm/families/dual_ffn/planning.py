"""The plan of the stage `train` on packs: parameters, tokens, memory of a device, operations, disk.

Parameters are counted on a model without memory; the rest are estimates, each with its rule beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from audiollm.codec import FRAME_RATE
from audiollm.data.records.sample import PHRASES
from audiollm.errors import ConfigError
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.shape import planned_shape
from audiollm.families.model_sizes import ASSUMED_CLIP_S, ENCODED, TEXT_ROWS
from audiollm.files.atomic import read_json
from audiollm.models.audio_stem import stem_values
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.encoder_flops import encoder_multiplications
from audiollm.models.frozen.shrink import planned_savings
from audiollm.models.layouts import transformers_config
from audiollm.recipe.stages import StagePlan, required
from audiollm.train.loop.optim import freeze
from audiollm.train.supervised_settings import TrainConfig

OWN_MB = 700
"""Python, torch, and the context of a device."""
STEM_COPIES = 3
"""Copies of a convolution's output that are kept for the backward pass: itself, its norm or activation, and the one
without gaps."""
VALUES_PER_ROW = 24
"""Kept for the backward pass, in hidden sizes a row and layer: norms, attention, and a feed-forward of 8/3."""

ROWS_PER_PHRASE = 15
"""Rows of a phrase beside its frames: marks, delay, and its words once more."""

GRADIENT_BYTES = 4
"""Of a parameter: gradients are summed in float32."""

LOOP_PREFIX = "model.model."
"""The training loop's names of the decoder's parameters, which `rules` go by: the task's module, and its losses'."""


@dataclass(frozen=True)
class Counts:
    """Parameters of a model."""

    total: int
    trained: int
    largest_unit: int
    """Parameters that FSDP2 and ZeRO 3 gather at a time: embeddings and heads, and two layers."""
    trains_encoder: bool
    small: int = 0
    """Frozen parameters that are stored in fewer bytes than float32 ..."""
    small_bytes: int = 0
    """... and these bytes."""


@dataclass(frozen=True)
class Data:
    """Size of the training data, as far as it is known beforehand."""

    samples: float | None
    length: float
    """Positions of a sample, on average."""
    encoded_share: float = 0.0
    """Samples whose recordings a frozen encoder has heard before."""


def plan_training(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Estimates for `plan`; where the start is not there yet, it says so and leaves out what depends on it.

    Raises:
        ConfigError, StageError: what it starts from is no model, or what is to be trained is not in it.
    """
    shape = planned_shape(config, plans)
    data = _data(config, plans, _rows_per_second(shape))
    batch = required(config.batch_size)
    steps = config.steps_for(data.samples / batch) if data.samples else config.steps
    tokens = (steps or 0) * batch * data.length
    seconds = config.budget_seconds()
    note = f"{config.budget_text()}, {batch} sequences a step"
    if data.samples is None:
        note += f", clips of {ASSUMED_CLIP_S:g} s assumed"
    if shape is None:
        return StagePlan(
            tokens=tokens,
            seconds=seconds,
            note=f"{note}; unknown until {_name_missing_start(config)} is there",
        )
    try:
        counts = count_parameters(config, shape)
    except ValueError as error:  # a pattern that fits nothing
        raise ConfigError(str(error), "train", "see `trained`, `lora` and `rules`") from error
    if counts.trained < counts.total:
        note += f", {counts.trained / 1e6:.1f} M trained"
    if counts.small:
        note += (
            f", {counts.small / 1e6:.1f} M in {config.frozen_weights} ({counts.small_bytes / 2**20:,.0f} MB)"
        )
    memory = partial(_memory_mb, config, shape, counts, batch * data.length)
    sound_s = max(0.0, data.length - TEXT_ROWS) / _rows_per_second(shape)
    return StagePlan(
        parameters=counts.total,
        tokens=tokens,
        memory_mb=memory(1),
        memory_mb_on=memory,
        disk_mb=_disk_mb(config, counts),
        seconds=seconds,
        flops=0.0 if seconds else (steps or 0) * batch * _flops_per_sample(config, shape, counts, data),
        gradient_bytes=GRADIENT_BYTES * (steps or 0) * counts.trained,
        sound_s=(steps or 0) * batch * sound_s,
        note=note,
        model=transformers_config(shape, None),
    )


def count_parameters(config: TrainConfig, shape: DualFFNConfig) -> Counts:
    """Exactly, by a model of that shape on the meta device with what is trained chosen as the stage does.

    Raises:
        ValueError: a pattern of `trained`, `lora` or `rules` that fits nothing.
    """
    with torch.device("meta"):
        model = DualFFN(shape)
        total = sum(parameter.numel() for parameter in model.parameters())
        layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
        outside = total - sum(p.numel() for p in model.model.layers.parameters())
        adapt(model, config.trained, config.lora, not config.freezes_encoder)
        small = (0, 0) if config.frozen_weights == "fp32" else planned_savings(model, config.frozen_weights)
    named = {f"{LOOP_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    freeze(named.items(), config.rules)
    trained = {name: parameter.numel() for name, parameter in named.items() if parameter.requires_grad}
    trains_encoder = any("audio_tower." in name for name in trained)
    return Counts(total, sum(trained.values()), outside + 2 * layer, trains_encoder, *small)


# ------------------------------------------------------------------------------------------------ private


def _name_missing_start(config: TrainConfig) -> str:
    settings = config.shape.audio_encoder
    if settings is not None and settings.path is not None and not settings.path.exists():
        return str(settings.path)
    return str(config.start)


def _rows_per_second(shape: DualFFNConfig | None) -> float:
    """Return the rows per second of audio: a codec's, or the audio encoder's where the model has one."""
    encoder = None if shape is None else shape.audio_encoder
    return FRAME_RATE if encoder is None else encoder.features.rows_per_second


def _data(config: TrainConfig, plans: Mapping[str, StagePlan], rows_per_second: float) -> Data:
    """By the counts of shards that are there, or else by the plan of the stage that makes them."""
    samples, frames, encoded, phrases, is_known = 0.0, 0.0, 0.0, 0.0, True
    for source in config.samples:
        path = Path(source.path)
        planned = next((plan for plan in plans.values() if path in plan.artifacts.values()), None)
        counts = _counts(path) if planned is None else _planned_counts(planned)
        is_known = is_known and counts is not None
        if counts is not None:
            samples, frames = samples + counts[0], frames + counts[1]
        if planned is not None:
            encoded += planned.facts.get(ENCODED, 0.0)
            phrases += planned.facts.get(PHRASES, 0.0)
    if not is_known or not samples:
        return Data(None, ASSUMED_CLIP_S * rows_per_second + TEXT_ROWS)
    rows = frames / samples * rows_per_second / FRAME_RATE + phrases / samples * ROWS_PER_PHRASE
    return Data(samples, min(rows + TEXT_ROWS, required(config.max_length)), encoded / samples)


def _counts(path: Path) -> tuple[float, float] | None:
    """Samples and frames as `index.json` tells them."""
    index = path / "index.json"
    index_counts = read_json(index).get("counts") if index.is_file() else None
    return (index_counts["samples"], index_counts["frames"]) if index_counts else None


def _planned_counts(plan: StagePlan) -> tuple[float, float] | None:
    facts = plan.facts
    frames = facts.get("frames", facts.get("audio_s", 0.0) * FRAME_RATE)
    return (facts["clips"], frames) if facts.get("clips") else None


def _memory_mb(
    config: TrainConfig, shape: DualFFNConfig, counts: Counts, rows_per_step: float, devices: int
) -> float:
    """Estimate a device's memory in MB: weights and Adam's states in fp32, gradients, averages, one pack's activations.

    In half precision autocast keeps a copy of the weights; where activations are computed again, of those that are
    trained. FSDP2 and ZeRO 3 hold 1 / devices of all and gather a part at a time; ZeRO 2 holds all weights, in half
    precision, and shares the rest. The least is the whole model in fp32, which each device has when training begins, or
    the machine, where a GPU trains beside frozen weights in fewer bytes.
    """
    half = 0 if config.precision == "fp32" else 2
    again = config.activation_checkpointing
    states = 4 * counts.trained * (4 if config.ema_decay else 3)
    weights: float = 4 * counts.total
    held: float
    if devices == 1 or config.strategy in ("auto", "ddp"):
        stored = weights - 4 * counts.small + counts.small_bytes
        cast = counts.total - counts.small
        held = stored + states + half * min(cast, counts.trained + counts.largest_unit if again else cast)
    elif config.strategy == "zero2":
        held = (half or 4) * counts.total + (states + 4 * counts.trained) / devices
    else:
        held = (weights + states) / devices + (half or 4) * counts.largest_unit
    rows = min(rows_per_step / devices, required(config.max_tokens))
    value = half or 4
    activations = rows * _count_activation_bytes(shape.num_layers, shape.hidden_size, value, again)
    if shape.audio_encoder is not None:
        encoder = shape.audio_encoder
        positions = rows * encoder.stride
        layers = encoder.encoder_layers if counts.trains_encoder else 1
        activations += positions * _count_activation_bytes(layers, encoder.d_model, value, again)
        if counts.trains_encoder:
            stem = (encoder.stem, encoder.num_mel_bins, encoder.stem_channels, encoder.d_model)
            activations += positions * STEM_COPIES * stem_values(*stem) * value
    return OWN_MB + max(held + activations, weights) / 2**20


def _count_activation_bytes(layers: int, width: int, value_bytes: int, again: bool) -> float:
    """Bytes a row that the backward pass needs: of all layers, or their inputs in fp32 and one layer's."""
    layer = VALUES_PER_ROW * width * value_bytes
    return layers * width * 4 + layer if again else layers * layer


def _disk_mb(config: TrainConfig, counts: Counts) -> float:
    """Three checkpoints while a new one is put before the last two, the best weights (twice for as long), the model."""
    checkpoint = 4 * (counts.total - counts.small) + 4 * counts.trained * (3 if config.ema_decay else 2)
    models = 4 * counts.total * (2 if config.keep_best else 1)
    return (3 * checkpoint + models) / 2**20


def _flops_per_sample(config: TrainConfig, shape: DualFFNConfig, counts: Counts, data: Data) -> float:
    """Forward, backward to the activations, and the gradients of what is trained: 2 operations a weight each.

    A row meets one of the two feed-forwards, and one of the heads, the audio's mostly. Activations that are computed
    again are work, too (in contrast to `training_flops`, which serves MFU).
    """
    length, attended = data.length, shape.num_heads * shape.head_dim
    width = 2 * attended + 2 * shape.num_kv_heads * shape.head_dim
    weights = shape.num_layers * shape.hidden_size * (width + 3 * shape.intermediate_size)
    weights += shape.hidden_size * shape.num_codebooks * shape.codebook_size
    again = 2 if config.activation_checkpointing else 0
    passes = 4 + 2 * counts.trained / counts.total + again
    flops: float = length * passes * (weights + shape.num_layers * attended * length)
    if shape.audio_encoder is not None:
        encoder = shape.audio_encoder
        positions: float = max(0.0, length - TEXT_ROWS) * encoder.stride
        if encoder.padded:
            positions = encoder.max_source_positions * -(-positions // encoder.max_source_positions)
        work = positions * encoder_multiplications(encoder)
        passes = 6 + again if counts.trains_encoder else 2 * (1 - data.encoded_share)
        flops += passes * work
    return flops
