"""A rank's part of a tensor: all of it, or one range of its flattened elements.

FSDP2 shards along dimension 0 and ZeRO cuts flattened tensors, so the part that a rank holds is one contiguous range
under both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.recipe.ranks import Ranks


@dataclass(frozen=True)
class Piece:
    """One contiguous range of a tensor's flattened elements, held by this rank alone.

    The ranges of all ranks follow each other without gap or overlap; a range may be empty.
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """Position of the first element in the flattened tensor."""
    values: Tensor
    """[elements], in the memory of the tensor."""


Held = Tensor | Piece
"""A tensor is whole and the same on every rank; a `Piece` is this rank's part of one."""


def gather_pieces(held: Held, ranks: Ranks) -> Tensor:
    """Join the parts of a tensor that the ranks hold, on every rank; all must call it.

    Returns:
        What the rank holds where that is whole; else new memory.
    """
    if not isinstance(held, Piece):
        return held
    flat = held.values.new_empty(math.prod(held.shape))
    spans: list[tuple[int, int]] = ranks.gather((held.start, held.values.numel()))
    for rank, (start, size) in enumerate(spans):
        span = flat[start : start + size]
        if rank == ranks.rank:
            span.copy_(held.values)
        if size and ranks.world > 1:
            torch.distributed.broadcast(span, src=rank)
    return flat.view(held.shape)


def padded_piece(shape: tuple[int, ...], partition: Tensor, rank: int) -> Piece:
    """This rank's piece where all ranks hold flat partitions of equal size, the last ones padded.

    Args:
        shape: shape of the whole tensor.
        partition: [elements], this rank's, with its padding.
    """
    size, total = partition.numel(), math.prod(shape)
    start = min(size * rank, total)
    return Piece(shape, start, partition.flatten()[: min(size, total - start)])
