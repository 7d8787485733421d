"""Caches of several answers as one, for joint steps of transformers' models.

Shapes: B rows, L positions of the longest row, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class JoinedCache:
    """Keys and values `[B, H, L, D]` of each layer; shorter rows are padded on the left, where nothing attends to."""

    def __init__(self) -> None:
        self.cache: Any = None
        """A `DynamicCache` of all rows; None: there are none."""
        self.lengths: list[int] = []
        """Positions of each row."""

    def join(self, cache: Any) -> None:
        """Add the `DynamicCache` of one row behind the others; it belongs to this object from then on."""
        length = cache.get_seq_length()
        if self.cache is None:
            self.cache, self.lengths = cache, [length]
            return
        longest = max(length, *self.lengths)
        for layer, row_layer in zip(self.cache.layers, cache.layers, strict=True):
            layer.keys = torch.cat([_pad_left(layer.keys, longest), _pad_left(row_layer.keys, longest)])
            layer.values = torch.cat([_pad_left(layer.values, longest), _pad_left(row_layer.values, longest)])
        self.lengths.append(length)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the padding that none of them needs."""
        if list(rows) == list(range(len(self.lengths))):
            return
        padding = max(self.lengths)
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = None
            return
        padding -= max(self.lengths)
        for layer in self.cache.layers:
            places = torch.tensor(list(rows), device=layer.keys.device)
            layer.keys = layer.keys[places, :, padding:]
            layer.values = layer.values[places, :, padding:]

    def next_mask(self) -> Tensor | None:
        """Mask `[B, L + 1]` of the positions that each row's next token attends to; None: rows are equally long."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        first_B1 = longest - torch.tensor(self.lengths)[:, None]
        return (torch.arange(longest + 1) >= first_B1).long()

    def advanced(self) -> None:
        """Count the position that a step of the model has added to each row."""
        self.lengths = [length + 1 for length in self.lengths]


def _pad_left(values_BHLD: Tensor, length: int) -> Tensor:
    return functional.pad(values_BHLD, (0, 0, length - values_BHLD.shape[2], 0))
