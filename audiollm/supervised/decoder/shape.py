"""The shape of the model that a training has: from its settings, or from the config.json of what it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from audiollm.models.decoder import DualFFNConfig
from audiollm.models.hub import read_config
from audiollm.models.layouts import LANGUAGE_MODELS, config_of, language_model_config
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan, required
from audiollm.supervised.decoder.encoder import encoder_of
from audiollm.supervised.settings import SIZES, TrainConfig


def shape_from_settings(
    config: TrainConfig, vocab_size: int, num_codebooks: int, codebook_size: int
) -> DualFFNConfig:
    """Return the shape of a model that begins at random, without its audio encoder.

    Args:
        codebook_size: of one codebook, BOS and EOS included.
    """
    model = config.shape
    heads = required(model.num_heads)
    return DualFFNConfig(
        vocab_size=vocab_size,
        num_codebooks=num_codebooks,
        codebook_size=codebook_size,
        hidden_size=required(model.hidden_size),
        num_layers=required(model.num_layers),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=required(model.hidden_size) // heads,
        intermediate_size=required(model.intermediate_size),
        dropout=model.dropout,
        qk_norm=model.qk_norm,
        sliding_window=model.sliding_window,
        sliding_window_layers=model.sliding_window_layers,
        audio_ffn_layers=model.audio_ffn_layers,
        max_position_embeddings=required(config.max_length),
    )


def planned_shape(
    config: TrainConfig, plans: Mapping[str, StagePlan], num_codebooks: int = 8, codebook_size: int = 1026
) -> DualFFNConfig | None:
    """Before anything runs: with a vocabulary as large as it may get, and without the few words that a start lacks.

    Args:
        plans: of the earlier stages, one of which may make what this one starts from.

    Returns:
        None where what it starts from (or the folder of its encoder) is not there yet.

    Raises:
        ConfigError, StageError: what it starts from is no model, or does not go with the settings.
    """
    settings = config.shape.audio_encoder
    if settings is not None and settings.path is not None and not settings.path.exists():
        return None
    if config.start is None:
        shape = shape_from_settings(config, SIZES[config.size].vocab_size, num_codebooks, codebook_size)
    else:
        data = _description(config, plans)
        where = str(config.start)
        if data is None:
            return None
        if data.get("model_type") in LANGUAGE_MODELS:
            layers = config.shape.audio_ffn_layers
            shape = language_model_config(data, where, num_codebooks, codebook_size, layers)
        else:
            shape = config_of(data, where)
        shape = with_window(shape, config)
    if config.audio_in == "features" and shape.audio_encoder is None:
        fresh = config.model_copy(update={"start": None})  # its start has none, or is not there to be read
        shape = replace(shape, audio_encoder=encoder_of(fresh) if settings is not None else None)
    return shape


def with_window(shape: DualFFNConfig, config: TrainConfig) -> DualFFNConfig:
    """Return the shape of what is started from with the sliding window of the settings, where they have one."""
    model = config.shape
    if model.sliding_window is None:
        return shape
    return replace(
        shape, sliding_window=model.sliding_window, sliding_window_layers=model.sliding_window_layers
    )


def _description(config: TrainConfig, plans: Mapping[str, StagePlan]) -> Mapping[str, Any] | None:
    """The config.json of what is started from: as an earlier stage will write it, or as it lies there."""
    start = required(config.start)
    for plan in plans.values():
        if start in plan.artifacts.values():
            return plan.model
    return read_config(model_folder(start)) if start.exists() else None
