"""Floating-point operations of an audio encoder, in closed form."""

from __future__ import annotations

from itertools import pairwise

from audiollm.data.hearing.features import PackedFeatures
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.audio_stem import stem_multiplications


def encoder_flops(
    config: AudioEncoderConfig, hidden_size: int, features: PackedFeatures, trained: bool
) -> float:
    """Count the operations of an audio encoder over the windows of a pack, and of its projector, in the same way.

    Every position of a window attends to the whole window.

    Args:
        trained: whether the encoder is, and not its projector alone: otherwise it has no backward pass.
    """
    window_positions = [frames // config.frames_per_position for frames in features.frames]
    positions = [config.max_source_positions] * len(window_positions) if config.padded else window_positions
    width = config.d_model
    weights = encoder_multiplications(config) * sum(positions)
    pairs = 2 * config.encoder_layers * width * sum(length**2 for length in positions)
    sizes = [config.row_width, *([config.projector_size] if config.projector_size else []), hidden_size]
    projector = features.num_encoded * sum(into * out for into, out in pairwise(sizes))
    return float((6 if trained else 2) * (weights + pairs) + 6 * projector)


def encoder_multiplications(config: AudioEncoderConfig) -> int:
    """Count the multiplications of a weight by a value, in the stem and the layers, for one position."""
    width = config.d_model
    layer = width * (4 * width + 2 * config.encoder_ffn_dim)
    stem = stem_multiplications(config.stem, config.num_mel_bins, config.stem_channels, width)
    return stem + config.encoder_layers * layer
