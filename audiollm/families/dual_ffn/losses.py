"""A DualFFN's losses of words and of codes over a pack.

Shapes: S packed rows, C hidden size, X rows with a target, K codebooks (1 for text), V codes or words.
"""

from __future__ import annotations

from torch import Tensor, nn

from audiollm.data.packing import PackedBatch
from audiollm.models.chunked_cross_entropy import CrossEntropy, linear_cross_entropy
from audiollm.models.dual_ffn import DualFFN, through_head


class TokenLosses(nn.Module):
    """A DualFFN and its losses as one module: the root that a distributed strategy wraps."""

    def __init__(self, model: DualFFN) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """As `token_losses`."""
        return token_losses(self.model, self.model(batch), batch)


def token_losses(model: DualFFN, hidden_SC: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    """Weighted sums of cross entropies, in nats: `text`, `audio`, and without gradient `audio_by_codebook` `[K]`.

    Divided by the batch's `counts` (those of the whole step, where a step has several packs) they are means.
    `hidden_SC` at row p predicts the target that `pack` put at row p, which is that of position p + 1.
    """
    text = _head_loss(
        model.text_lm_head, hidden_SC, batch.text_target_index, batch.text_targets, batch.text_weights
    )
    audio = _head_loss(
        model.audio_lm_head,
        hidden_SC,
        batch.audio_target_index,
        batch.audio_targets_XK,
        batch.audio_weights_XK,
    )
    return {"text": text.total, "audio": audio.total, "audio_by_codebook": audio.by_codebook_K}


def _head_loss(
    head: nn.Module, hidden_SC: Tensor, index_X: Tensor, targets: Tensor, weights: Tensor
) -> CrossEntropy:
    def use(hidden_XC: Tensor, weight_VC: Tensor) -> CrossEntropy:
        return linear_cross_entropy(hidden_XC, weight_VC, targets, weights)

    losses: CrossEntropy = through_head(head, hidden_SC.index_select(0, index_X), use)
    return losses
