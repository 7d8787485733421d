"""Keys and values of every layer, preallocated, and attention over them: of whole prompts, of one position a row.

A row of the cache holds one sequence. The host knows how much of each row is filled, so that attention takes the
filled part alone and nothing waits for the device.

Shapes: S rows of a pack, P those of them that are kept, R rows of the cache that go on (its first ones), X the same
in the model's order (text first), L cache length, H heads, G key and value heads, D head dimension, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.data.packing import PackedBatch
from audiollm.models.attention import cached_attention, rotary_angles
from audiollm.models.decoder import AttendPacked, DualFFNConfig


@dataclass
class Cache:
    """Keys and values of every layer, and how many positions of each row are filled."""

    keys_NRGLD: Tensor
    values_NRGLD: Tensor
    cosine_LD: Tensor
    """Of every position that there may be: computed once."""
    sine_LD: Tensor
    lengths: list[int]
    window: int | None
    """The model's sliding window."""

    @classmethod
    def empty(
        cls,
        config: DualFFNConfig,
        rows: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Cache:
        shape = (config.num_layers, rows, config.num_kv_heads, length, config.head_dim)
        places_L = torch.arange(length, device=device)
        angles = rotary_angles(places_L, config.head_dim, config.rope_theta, config.rope_scaling)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(keys, values, *angles, [0] * rows, config.sliding_window)

    @property
    def length(self) -> int:
        """The positions that a row has room for."""
        return self.keys_NRGLD.shape[3]

    def move(self, source: int, target: int) -> None:
        """Copy what is filled of a row into another, which is overwritten."""
        filled = self.lengths[source]
        for kept in (self.keys_NRGLD, self.values_NRGLD):
            kept[:, target, :, :filled] = kept[:, source, :, :filled]
        self.lengths[target] = filled


@dataclass(frozen=True)
class FillCache:
    """Attention inside each sequence of a pack, whose keys and values are kept in rows of a cache."""

    cache: Cache
    attend: AttendPacked
    rows_P: Tensor
    """Rows of the pack that are kept: those of its sequences, and no idle ones."""
    row_P: Tensor
    """The cache row and the position of each."""
    position_P: Tensor

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        self.cache.keys_NRGLD[layer][self.row_P, :, self.position_P] = k_SGD[self.rows_P]
        self.cache.values_NRGLD[layer][self.row_P, :, self.position_P] = v_SGD[self.rows_P]
        return self.attend(layer, q_SHD, k_SGD, v_SGD).to(q_SHD.dtype)


def fill_cache(
    cache: Cache, batch: PackedBatch, rows: Sequence[int], lengths: Sequence[int], attend: AttendPacked
) -> FillCache:
    """For a pack whose first sequences have these lengths and go into these rows of the cache, from position 0."""
    device, total = batch.row_of_S.device, sum(lengths)
    row_P = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths)).to(device)
    position_P = torch.cat([torch.arange(length) for length in lengths]).to(device)
    for row, length in zip(rows, lengths, strict=True):
        cache.lengths[row] = length
    return FillCache(cache, attend, batch.row_of_S[:total], row_P, position_P)


@dataclass(frozen=True)
class AttendCached:
    """One new position in each of the first R rows of a cache, over what that row holds."""

    cache: Cache
    place_X: Tensor
    """The new position of each row of the model's batch: one number for all where it is the same."""
    write_at: tuple[Any, ...]
    """Where the new keys and values of `[R, G, L, D]` go."""
    span: slice
    """Cached positions that any row may look at."""
    visible_R1L: Tensor | None
    """Those of the span that each row may look at; None for all."""
    order_R: Tensor | None
    """The cache row of each row of the model's batch; None where they are in the cache's order."""
    rank_R: Tensor | None
    """Its inverse."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        if self.rank_R is not None:
            q_SHD, k_SGD, v_SGD = (each.index_select(0, self.rank_R) for each in (q_SHD, k_SGD, v_SGD))
        rows = len(q_SHD)
        keys_RGLD, values_RGLD = self.cache.keys_NRGLD[layer, :rows], self.cache.values_NRGLD[layer, :rows]
        keys_RGLD[self.write_at] = k_SGD
        values_RGLD[self.write_at] = v_SGD
        attended_RHD = cached_attention(
            q_SHD[:, :, None], keys_RGLD[:, :, self.span], values_RGLD[:, :, self.span], self.visible_R1L
        )[:, :, 0]
        return attended_RHD if self.order_R is None else attended_RHD.index_select(0, self.order_R)


def attend_cached(cache: Cache, rows: int, order_R: Tensor | None) -> AttendCached:
    """For one new position in each of the first `rows` rows, which then counts as filled.

    Raises:
        ValueError: a row is full.
    """
    device, lengths = cache.keys_NRGLD.device, cache.lengths[:rows]
    low, high = min(lengths), max(lengths)
    if high >= cache.length:
        raise ValueError(f"the cache has room for {cache.length} positions a row, and one is full")
    first = 0 if cache.window is None else max(0, low - cache.window + 1)
    span = slice(first, high + 1)
    cache.lengths[:rows] = [length + 1 for length in lengths]
    rank_R = None if order_R is None else order_R.argsort()
    if low == high:
        place_1 = torch.full((1,), low, device=device)
        return AttendCached(cache, place_1, (slice(None), slice(None), low), span, None, order_R, rank_R)
    place_R = torch.tensor(lengths, device=device)
    behind_RL = place_R[:, None] - torch.arange(span.start, span.stop, device=device)
    visible_RL = behind_RL >= 0 if cache.window is None else (behind_RL >= 0) & (behind_RL < cache.window)
    write_at = (torch.arange(rows, device=device), slice(None), place_R)
    place_X = place_R if order_R is None else place_R[order_R]
    return AttendCached(cache, place_X, write_at, span, visible_RL[:, None], order_R, rank_R)
