"""Floating-point operations of a training step, in closed form."""

from __future__ import annotations

from audiollm.data.packing import PackedBatch
from audiollm.models.decoder import DualFFNConfig


def training_flops(config: DualFFNConfig, batch: PackedBatch) -> float:
    """Count the decoder's operations, forward and backward over a pack: 6 for every weight that a row meets, 12 for
    every pair that it attends to. An audio encoder comes on top of it (`models.encoder_flops`).

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
