"""The table of offsets: which frame each head of a talker has learned to predict.

The cross entropy of each head against its labels as trained, against those of frames before and behind, and against the
codebooks beside. A model whose labels were shifted in training predicts those of another place better.

Shapes: F first codes, D frames with other codes, K codebooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

FRAME_OFFSETS = (-1, 0, 1, 2)
BOOK_OFFSETS = (-1, 1)
PLACES = (*((frame, 0) for frame in FRAME_OFFSETS), *((0, book) for book in BOOK_OFFSETS))
"""Places of labels: frames behind and codebooks behind those of the training."""
LEAST_GAIN = 0.05
"""Nats by which another place must be better to be told: better than the head's own, and than any code as likely as
another. The heads of an untrained model are right nowhere."""
SURE_ERRORS = 4.0
"""Standard errors of the difference by which it must be better beside that: a table has dozens of places."""


@runtime_checkable
class GivesOffsets(Protocol):
    """A policy whose heads can be compared with labels of other places."""

    @property
    def codebook_size(self) -> int:
        """Codes of each codebook."""

    @property
    def has_tied_heads(self) -> bool:
        """Whether heads are the embeddings of codes: with random weights they predict the codes that a row holds."""

    def offset_losses(self, root: Any, batch: Any, places: Any) -> Tensor:
        """Numbers, sums and sums of squares `[3, K, P]` of each head's cross entropies against labels of each place.

        Args:
            root: the policy's, as the strategy wrapped it.
            places: `PLACES`; where a place has no label, nothing is counted.
        """


@dataclass(frozen=True)
class OffsetTable:
    """Mean cross entropies in nats, by head and place; None where no label was."""

    loss_KP: tuple[tuple[float | None, ...], ...]
    error_KP: tuple[tuple[float, ...], ...]
    """Standard errors of the means; infinite where a mean has fewer than two labels."""
    codebook_size: int
    has_tied_heads: bool = False
    """Whether the place of the frame before, whose codes the row holds, says nothing of the labels of a training."""

    @property
    def shifted(self) -> Mapping[int, tuple[int, int]]:
        """Heads that predict the labels of another place better, and the place."""
        worse, unlearned = {}, math.log(self.codebook_size)
        trained = PLACES.index((0, 0))
        for head, (losses, errors) in enumerate(zip(self.loss_KP, self.error_KP, strict=True)):
            own = losses[trained]
            places = zip(losses, errors, PLACES, strict=True)
            known = [row for row in places if row[0] is not None and row[2] not in self._copied_places]
            if own is None:
                continue
            best, error, place = min(known)
            margin = LEAST_GAIN + SURE_ERRORS * math.hypot(error, errors[trained])
            if best is not None and best < min(own, unlearned) - margin:
                worse[head] = place
        return worse

    @property
    def _copied_places(self) -> tuple[tuple[int, int], ...]:
        return ((-1, 0),) if self.has_tied_heads else ()

    def sentence(self) -> str:
        """What the table says of heads that predict another place; empty where none does."""
        if not self.shifted:
            return ""
        head, (frame, book) = next(iter(self.shifted.items()))
        place = f"frame {frame:+d}" if frame else f"codebook {book:+d}"
        return (
            f"{len(self.shifted)} of {len(self.loss_KP)} heads predict the labels of another place better than their "
            f"own: head {head} those of {place}. The model was trained with shifted labels, here or before"
        )


def offset_table(policy: GivesOffsets, root: Any, batches: Iterable[Any]) -> OffsetTable:
    """The table over batches of held-out speech, without gradient."""
    with torch.no_grad():
        moments = sum(policy.offset_losses(root, batch, PLACES).double().cpu() for batch in batches)
    assert isinstance(moments, Tensor)
    count_KP, sum_KP, square_KP = moments
    mean_KP = sum_KP / count_KP
    variance_KP = (square_KP - count_KP * mean_KP.square()).clamp_min(0) / (count_KP - 1)
    error_KP = torch.where(count_KP > 1, (variance_KP / count_KP).sqrt(), torch.inf)
    losses = [
        tuple(mean if count else None for mean, count in zip(*row, strict=True))
        for row in zip(mean_KP.tolist(), count_KP.tolist(), strict=True)
    ]
    errors = tuple(map(tuple, error_KP.tolist()))
    return OffsetTable(tuple(losses), errors, policy.codebook_size, policy.has_tied_heads)
