"""A DualFFN's losses of words and of codes over a pack.

Shapes: S packed rows, C hidden size, X rows with a target, K codebooks (1 for text), V codes or words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from audiollm.data.chat.template import Template
from audiollm.data.packing import PackedBatch
from audiollm.families.dual_ffn.flops import training_flops
from audiollm.families.packed_training import PackedModel
from audiollm.families.target_logits import MAX_TARGETS, Logits, head_logits
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Request
from audiollm.models.chunked_cross_entropy import CrossEntropy, HeadWeight, linear_cross_entropy
from audiollm.models.dual_ffn import DualFFN, through_head
from audiollm.models.encoder_flops import encoder_flops


class TokenLosses(PackedModel):
    """A `PackedModel` of a DualFFN."""

    def __init__(self, model: DualFFN) -> None:
        super().__init__()
        self.model = model

    @property
    def num_codebooks(self) -> int:
        """See `PackedModel.num_codebooks`."""
        return self.model.config.num_codebooks

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """As `token_losses`."""
        return token_losses(self.model, self.model(batch), batch)

    def flops(self, pack: PackedBatch) -> float:
        """See `PackedModel.flops`."""
        config = self.model.config
        decoder = training_flops(config, pack)
        if config.audio_encoder is None or pack.features is None:
            return decoder
        trained = self.model.audio_tower.is_trained
        return decoder + encoder_flops(config.audio_encoder, config.hidden_size, pack.features, trained)

    def engine(self, template: Template, requests: Sequence[Request]) -> Engine:
        """See `PackedModel.engine`."""
        return Engine.sized_for(self.model, template, requests)

    def target_logits(self, batch: PackedBatch) -> Logits:
        """See `GivesLogits.target_logits`."""
        was_training = self.training
        self.eval()
        hidden_SC = self.model(batch)
        self.train(was_training)
        return packed_logits(self.model, hidden_SC, batch)

    def empty_copy(self, device: torch.device, dtype: torch.dtype) -> TokenLosses:
        """See `PackedModel.empty_copy`."""
        return TokenLosses(self.model.empty_copy(device, dtype))


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


def packed_logits(model: DualFFN, hidden_SC: Tensor, batch: PackedBatch) -> Logits:
    """Compute the logits of the first targets of a pack, those of words and of codes, where it has them."""
    books = model.config.num_codebooks
    heads = (
        (model.text_lm_head, batch.text_target_index[:MAX_TARGETS], 1),
        (model.audio_lm_head, batch.audio_target_index[: MAX_TARGETS // books], books),
    )
    counts = batch.counts["text"], batch.counts["audio"]
    return [
        through_head(head, hidden_SC.index_select(0, index_T), partial(head_logits, books=head_books))
        for (head, index_T, head_books), count in zip(heads, counts, strict=True)
        if count
    ]


def _head_loss(
    head: nn.Module, hidden_SC: Tensor, index_X: Tensor, targets: Tensor, weights: Tensor
) -> CrossEntropy:
    def use(hidden_XC: Tensor, weight_VC: HeadWeight) -> CrossEntropy:
        return linear_cross_entropy(hidden_XC, weight_VC, targets, weights)

    losses: CrossEntropy = through_head(head, hidden_SC.index_select(0, index_X), use)
    return losses
