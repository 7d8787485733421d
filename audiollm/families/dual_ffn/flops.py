"""Floating-point operations of a training step, in closed form."""

from __future__ import annotations

from itertools import pairwise

from audiollm.data.hearing.features import PackedFeatures
from audiollm.data.packing import PackedBatch
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.audio_stem import stem_multiplications
from audiollm.models.decoder import DualFFNConfig


def training_flops(config: DualFFNConfig, batch: PackedBatch) -> float:
    """Count the decoder's operations, forward and backward over a pack: 6 for every weight that a row meets, 12 for
    every pair that it attends to. An audio encoder comes on top of it (`encoder_flops`).

    As PaLM counts (arXiv 2204.02311, appendix B), but for the causal half of the pairs alone, a row's own
    feed-forward, and the heads where there are targets. Recomputed activations do not count.
    """
    attended = config.num_heads * config.head_dim
    width = 2 * attended + 2 * config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (width + 3 * config.intermediate_size)
    rows = len(batch.positions_S)
    pairs = sum(length * (length + 1) / 2 for length in batch.layout.lengths)
    text_head = len(batch.text_targets) * config.vocab_size
    audio_head = len(batch.audio_targets_XK) * config.num_codebooks * config.codebook_size
    weights = config.num_layers * layer * rows + config.hidden_size * (text_head + audio_head)
    return float(6 * weights + 12 * config.num_layers * attended * pairs)


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
    projector_inputs = width * (config.stride if config.reduction == "concat" else 1)
    sizes = [projector_inputs, *([config.projector_size] if config.projector_size else []), hidden_size]
    projector = sum(features.rows) * sum(into * out for into, out in pairwise(sizes))
    return float((6 if trained else 2) * (weights + pairs) + 6 * projector)


def encoder_multiplications(config: AudioEncoderConfig) -> int:
    """Count the multiplications of a weight by a value, in the stem and the layers, for one position."""
    width = config.d_model
    layer = width * (4 * width + 2 * config.encoder_ffn_dim)
    stem = stem_multiplications(config.stem, config.num_mel_bins, config.stem_channels, width)
    return stem + config.encoder_layers * layer
