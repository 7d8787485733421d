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


@runtime_checkable
class GivesOffsets(Protocol):
    """A policy whose heads can be compared with labels of other places."""

    @property
    def codebook_size(self) -> int:
        """Codes of each codebook."""

    def offset_losses(self, root: Any, batch: Any, places: Any) -> tuple[Tensor, Tensor]:
        """Sum the cross entropies of each head `[K, P]` against labels of each place, and count them.

        Args:
            root: the policy's, as the strategy wrapped it.
            places: `PLACES`; where a place has no label, nothing is counted.
        """


@dataclass(frozen=True)
class OffsetTable:
    """Mean cross entropies in nats, by head and place; None where no label was."""

    loss_KP: tuple[tuple[float | None, ...], ...]
    codebook_size: int

    @property
    def shifted(self) -> Mapping[int, tuple[int, int]]:
        """Heads that predict the labels of another place better, and the place."""
        worse, unlearned = {}, math.log(self.codebook_size)
        trained = PLACES.index((0, 0))
        for head, losses in enumerate(self.loss_KP):
            own = losses[trained]
            known = [(loss, place) for loss, place in zip(losses, PLACES, strict=True) if loss is not None]
            if own is not None and known and min(known)[0] < min(own, unlearned) - LEAST_GAIN:
                worse[head] = min(known)[1]
        return worse

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
    sums, counts = torch.zeros(0), torch.zeros(0)
    with torch.no_grad():
        for batch in batches:
            part, number = policy.offset_losses(root, batch, PLACES)
            sums = part.double().cpu() if not len(sums) else sums + part.double().cpu()
            counts = number.double().cpu() if not len(counts) else counts + number.double().cpu()
    rows = [
        tuple(float(total / count) if count else None for total, count in zip(*row, strict=True))
        for row in zip(sums, counts, strict=True)
    ]
    return OffsetTable(tuple(rows), policy.codebook_size)
