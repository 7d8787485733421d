"""Keys and values of every layer, preallocated, and attention of new positions over them.

Shapes: S rows, B sequences, Q new positions, L cache length, H heads, G key and value heads, D head dimension,
N layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.models.attention import cached_attention
from audiollm.models.decoder import DualFFNConfig


@dataclass
class Cache:
    """Keys and values of every layer, preallocated, and how much of each sequence's is filled."""

    keys_NBGLD: Tensor
    values_NBGLD: Tensor
    lengths_B: Tensor

    @classmethod
    def empty(
        cls,
        config: DualFFNConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Cache:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        zeros = torch.zeros(shape, device=device, dtype=dtype)
        return cls(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.long, device=device))


@dataclass(frozen=True)
class AttendCached:
    """New positions, appended to a cache, over all that is in it."""

    cache: Cache
    positions_BQ: Tensor
    row_of_S: Tensor
    order_S: Tensor
    span: slice
    """Cached positions that any query may look at."""
    visible_BQL: Tensor
    """Those of the span that each query may look at."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        shape = self.positions_BQ.shape
        q, k, v = (rows[self.row_of_S].unflatten(0, shape) for rows in (q_SHD, k_SGD, v_SGD))
        keys_BGLD, values_BGLD = self.cache.keys_NBGLD[layer], self.cache.values_NBGLD[layer]
        rows_B1 = torch.arange(shape[0], device=q.device)[:, None]
        keys_BGLD[rows_B1, :, self.positions_BQ] = k
        values_BGLD[rows_B1, :, self.positions_BQ] = v
        attended_BHQD = cached_attention(
            q.transpose(1, 2), keys_BGLD[:, :, self.span], values_BGLD[:, :, self.span], self.visible_BQL
        )
        return attended_BHQD.transpose(1, 2).flatten(0, 1)[self.order_S]


def attend_cached(
    cache: Cache, positions_BQ: Tensor, row_of_S: Tensor, order_S: Tensor, window: int | None
) -> AttendCached:
    first = 0 if window is None else max(0, int(positions_BQ.min()) - window + 1)
    span = slice(first, int(positions_BQ.max()) + 1)
    place_L = torch.arange(span.start, span.stop, device=positions_BQ.device)
    behind_BQL = positions_BQ[:, :, None] - place_L
    visible_BQL = behind_BQL >= 0 if window is None else (behind_BQL >= 0) & (behind_BQL < window)
    return AttendCached(cache, positions_BQ, row_of_S, order_S, span, visible_BQL)
