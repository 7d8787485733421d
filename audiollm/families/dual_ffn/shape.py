"""The shape of the model that a training has: from its settings, or from the config.json of what it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from audiollm.data.hearing.features import FRAMES_PER_SECOND
from audiollm.errors import StageError
from audiollm.families.audio_encoders import published_encoder, window_options
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.audio_stem import FRAMES_PER_POSITION
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.hub import is_language_model, read_config
from audiollm.models.layouts import LANGUAGE_MODELS, config_of, language_model_config
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import StagePlan, required
from audiollm.train.supervised_settings import SIZES, AudioEncoderSettings, TrainConfig

DEFAULT_WINDOW_S = 30


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


def encoder_of(config: TrainConfig) -> AudioEncoderConfig | None:
    """The encoder that the trained model has; None: what is heard is given to it as codes.

    Raises:
        StageError: `start` has an encoder and is to go without it, or has none, or two are asked for.
    """
    start_encoder, settings = encoder_of_start(config), config.shape.audio_encoder
    if config.audio_in == "codes":
        if start_encoder is not None:
            raise StageError(f"{config.start} hears through an audio encoder", "set audio_in: features", 2)
        return None
    if start_encoder is None and settings is None:
        raise StageError(
            f"{config.start} has no audio encoder", "give shape.audio_encoder, or audio_in: codes", 2
        )
    if start_encoder is not None and settings is not None and settings.model_fields_set - {"trained"}:
        raise StageError(
            f"{config.start} has an audio encoder of its own",
            "leave shape.audio_encoder out, but for `trained`",
            2,
        )
    return start_encoder or _from_settings(required(settings), config)


def encoder_of_start(config: TrainConfig) -> AudioEncoderConfig | None:
    """The encoder of the model to begin from."""
    if config.start is None or is_language_model(config.start):
        return None
    folder = model_folder(config.start)
    return config_of(read_config(folder), str(folder / "config.json")).audio_encoder


def _description(config: TrainConfig, plans: Mapping[str, StagePlan]) -> Mapping[str, Any] | None:
    """The config.json of what is started from: as an earlier stage will write it, or as it lies there."""
    start = required(config.start)
    for plan in plans.values():
        if start in plan.artifacts.values():
            return plan.model
    return read_config(model_folder(start)) if start.exists() else None


def _from_settings(settings: AudioEncoderSettings, config: TrainConfig) -> AudioEncoderConfig:
    """A published encoder is given windows that are filled up, as it was trained; one from scratch none."""
    if settings.path is not None:
        return published_encoder(settings)
    options = window_options(settings)
    if settings.window_s is None:
        frames_per_second = FRAMES_PER_SECOND / FRAMES_PER_POSITION[settings.stem]
        stride = options["stride"]
        options["max_source_positions"] = int(DEFAULT_WINDOW_S * frames_per_second) // stride * stride
    hidden = settings.hidden_size or required(config.shape.hidden_size)
    try:
        return AudioEncoderConfig(
            d_model=hidden,
            encoder_layers=settings.num_layers or max(2, 2 * required(config.shape.num_layers) // 3),
            encoder_attention_heads=settings.num_heads or max(1, hidden // 64),
            encoder_ffn_dim=settings.intermediate_size or 4 * hidden,
            num_mel_bins=settings.num_mel_bins or 80,
            stem=settings.stem,
            stem_channels=settings.stem_channels or AudioEncoderConfig.stem_channels,
            **options,
        )
    except ValueError as error:
        raise StageError(str(error), "see shape.audio_encoder", 2) from error
