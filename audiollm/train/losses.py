"""Cross entropy of text and of audio codes, each normalised apart and weighted.

Shapes: S packed positions, C hidden size, X positions with a target, K codebooks, V codes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from audiollm.data.packing import PackedBatch
from audiollm.models.dual_ffn import DualFFN


def token_losses(model: DualFFN, hidden_SC: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    """`{"text": ..., "audio": ...}`, in nats; the batch's weights make the means (see `packing.py`).

    `hidden_SC` at row p predicts the target that `pack` put at row p, which is that of position p + 1.
    """
    losses = {}
    if len(batch.text_target_index):
        logits = model.text_logits(hidden_SC.index_select(0, batch.text_target_index)).float()
        each_X = functional.cross_entropy(logits, batch.text_targets, reduction="none")
        losses["text"] = (each_X * batch.text_weights).sum()
    if len(batch.audio_target_index):
        logits_XKV = model.audio_logits(hidden_SC.index_select(0, batch.audio_target_index)).float()
        targets = batch.audio_targets_XK.flatten()
        each = functional.cross_entropy(logits_XKV.flatten(0, 1), targets, reduction="none")
        losses["audio"] = (each * batch.audio_weights_XK.flatten()).sum()
    return losses
