"""The audio encoder of a training with `audio_in: features`: its shape, its weights, and whether it is frozen."""

from __future__ import annotations

from typing import Any

from audiollm.data.hearing.features import FRAMES_PER_SECOND
from audiollm.errors import ConfigError, StageError
from audiollm.models.audio_encoder import AudioEncoderConfig, encoder_config, load_tower
from audiollm.models.audio_stem import DEFAULT_STRIDE, FRAMES_PER_POSITION
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import is_language_model, read_config
from audiollm.models.layouts import config_of
from audiollm.models.pretrained import model_folder
from audiollm.recipe.stages import required
from audiollm.supervised.settings import AudioEncoderSettings, TrainConfig

DEFAULT_WINDOW_S = 30


def encoder_of(config: TrainConfig) -> AudioEncoderConfig | None:
    """The encoder that the trained model has; None: what is heard is given to it as codes.

    Raises:
        StageError: `start` has an encoder and is to go without it, or has none, or two are asked for.
    """
    start_encoder, settings = _encoder_of_start(config), config.shape.audio_encoder
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


def add_encoder(model: DualFFN, config: TrainConfig) -> None:
    """Give the model its encoder, where it is to have one and does not have it yet.

    Raises:
        StageError: no weights of that shape in the folder of the encoder.
    """
    encoder, settings = encoder_of(config), config.shape.audio_encoder
    if encoder is None or model.config.audio_encoder is not None:
        return
    model.add_audio_encoder(encoder)
    if settings is not None and settings.path is not None:
        try:
            load_tower(model.audio_tower, settings.path)
        except ConfigError as error:
            raise StageError(str(error), "see shape.audio_encoder.path", 2) from error


def freeze_encoder(model: DualFFN, config: TrainConfig) -> None:
    """Freeze the encoder where it is to stay as it is; after `adapt`, whose patterns do not ask.

    Raises:
        StageError: a projector that begins at random is not trained.
    """
    settings = config.shape.audio_encoder
    if model.config.audio_encoder is None:
        return
    if settings is not None and not settings.trained:
        model.audio_tower.freeze()
    is_trained = any(parameter.requires_grad for parameter in model.audio_encoder_proj.parameters())
    if not is_trained and _encoder_of_start(config) is None:
        raise StageError(
            "the projector of the new audio encoder begins at random, and nothing trains it",
            "add 'audio_encoder_proj.*' to `trained`, or audio_encoder_proj to lora.trained_beside",
            2,
        )


# Private


def _encoder_of_start(config: TrainConfig) -> AudioEncoderConfig | None:
    if config.start is None or is_language_model(config.start):
        return None
    folder = model_folder(config.start)
    return config_of(read_config(folder), str(folder / "config.json")).audio_encoder


def _from_settings(settings: AudioEncoderSettings, config: TrainConfig) -> AudioEncoderConfig:
    """A published encoder is given windows that are filled up, as it was trained; one from scratch none."""
    stride = settings.stride or DEFAULT_STRIDE[settings.stem]
    options: dict[str, Any] = {
        name: getattr(settings, name) for name in ("reduction", "projector_size", "dropout")
    } | {"stride": stride}
    if settings.padded is not None:
        options["padded"] = settings.padded
    frames_per_second = FRAMES_PER_SECOND / FRAMES_PER_POSITION[settings.stem]
    if settings.window_s is not None:
        options["max_source_positions"] = round(settings.window_s * frames_per_second)
    elif settings.path is None:
        options["max_source_positions"] = int(DEFAULT_WINDOW_S * frames_per_second) // stride * stride
    hidden = settings.hidden_size or required(config.shape.hidden_size)
    try:
        if settings.path is not None:
            return encoder_config(settings.path, **options)
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
    except (ConfigError, ValueError) as error:
        raise StageError(str(error), "see shape.audio_encoder", 2) from error
