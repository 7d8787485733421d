"""Keys and values of every layer, preallocated, and attention over them: of whole prompts, of one position a row.

A row of the cache holds one sequence. The host knows how much of each row is filled, so that attention takes the
filled part alone and nothing waits for the device.

Shapes: S rows of a pack, P those of them that are kept, R rows of the cache that go on (its first ones), X the same
in the model's order (text first), L cache length, H heads, G key and value heads, B both rows and these heads
(R x G), D head dimension, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from audiollm.data.packing import PackedBatch
from audiollm.models.attention import attends_by_products, cached_attention, rotary_angles
from audiollm.models.decoder import AttendPacked, DualFFNConfig


@dataclass
class Cache:
    """Keys and values of every layer, and how many positions of each row are filled."""

    keys_NRGDL: Tensor
    values_NRGLD: Tensor
    cosine_LD: Tensor
    """Rotary cosines of all L positions, computed once."""
    sine_LD: Tensor
    lengths: list[int]
    windows: tuple[int | None, ...]
    """The sliding window of each layer; None for none."""
    pinned: list[int | None]
    """For each row that forgets, the number of its first positions that it keeps; None: the row holds all positions."""

    @classmethod
    def empty(
        cls,
        config: DualFFNConfig,
        rows: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Cache:
        before = (config.num_layers, rows, config.num_kv_heads)
        values = torch.zeros(*before, length, config.head_dim, device=device, dtype=dtype)
        if attends_by_products(device, dtype):  # which read keys sooner where those of a row lie side by side
            keys = torch.zeros(*before, config.head_dim, length, device=device, dtype=dtype)
        else:
            keys = torch.zeros_like(values).transpose(3, 4)
        places_L = torch.arange(length, device=device)
        angles = rotary_angles(places_L, config.head_dim, config.rope_theta, config.rope_scaling)
        windows = tuple(map(config.window_of, range(config.num_layers)))
        return cls(keys, values, *angles, [0] * rows, windows, [None] * rows)

    @cached_property
    def signed_sine_LD(self) -> Tensor:
        """The sines with the first half negative, as a rotation of swapped halves takes them."""
        first, second = self.sine_LD.chunk(2, dim=-1)
        return torch.cat([-first, second], dim=-1)

    @property
    def length(self) -> int:
        """The positions that a row has room for."""
        return self.keys_NRGDL.shape[4]

    def lengthened(self, config: DualFFNConfig, length: int) -> Cache:
        """Return a cache of longer rows with the same content.

        Raises:
            ValueError: a row forgets: its places depend on the length.
        """
        if any(prefix is not None for prefix in self.pinned):
            raise ValueError("a cache with rows that forget cannot become longer")
        rows, old = self.keys_NRGDL.shape[1], self.length
        longer = Cache.empty(config, rows, length, self.keys_NRGDL.device, self.keys_NRGDL.dtype)
        longer.keys_NRGDL[..., :old], longer.values_NRGLD[:, :, :, :old] = self.keys_NRGDL, self.values_NRGLD
        longer.lengths = self.lengths
        return longer

    def move(self, source: int, target: int) -> None:
        """Copy what is filled of a row into another, which is overwritten."""
        length, pinned = self.lengths[source], self.pinned[source]
        self.copy(source, target, min(length, self.length))
        self.lengths[target], self.pinned[target] = length, pinned

    def copy(self, source: int, target: int, filled: int) -> None:
        """Copy the first positions of a row into another, which is overwritten and then holds them alone."""
        self.keys_NRGDL[:, target, ..., :filled] = self.keys_NRGDL[:, source, ..., :filled]
        self.values_NRGLD[:, target, :, :filled] = self.values_NRGLD[:, source, :, :filled]
        self.lengths[target], self.pinned[target] = filled, None

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.lengths[row], self.pinned[row] = 0, None

    def keep_prefix(self, row: int, prefix: int) -> None:
        """Let a row forget what its window has left behind, except its first positions: it is then never full.

        Raises:
            ValueError: a layer has no window, or the row has no room for the prefix and a window.
        """
        windows = [window for window in self.windows if window is not None]
        if len(windows) < len(self.windows):
            raise ValueError("an endless stream needs a model with a sliding window in every layer")
        if prefix + max(windows) > self.length or not prefix <= self.lengths[row] <= self.length:
            raise ValueError(
                f"a row of {self.length} places cannot keep {prefix} positions beside a window of {max(windows)}"
            )
        self.pinned[row] = prefix

    def claim_positions(self, rows: int) -> list[int]:
        """Return the next position of each of the first `rows` rows, and count it as filled.

        Raises:
            ValueError: one of these rows is full.
        """
        positions = self.lengths[:rows]
        if max(positions) >= self.length:
            raise ValueError(f"the cache has room for {self.length} positions a row, and one is full")
        self.lengths[:rows] = [position + 1 for position in positions]
        return positions

    def largest_append(self, row: int) -> int:
        """Return the most positions that a row takes at once."""
        prefix = self.pinned[row]
        if prefix is None:
            return self.length - self.lengths[row]
        return self.length - prefix - max(window or 0 for window in self.windows) + 1

    def check_room(self, row: int, count: int) -> None:
        """Raises: ValueError: the row has no room for so many more positions at once."""
        room = self.largest_append(row)
        if count > room and self.pinned[row] is None:
            raise ValueError(f"the cache has room for {self.length} positions a row, and one is full")
        if count > room:
            raise ValueError(
                f"{count} positions at once: a row of {self.length} places takes {room} beside its prefix and window"
            )


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
        self.keep(layer, k_SGD, v_SGD)
        return self.attend(layer, q_SHD, k_SGD, v_SGD).to(q_SHD.dtype)

    def keep(self, layer: int, k_SGD: Tensor, v_SGD: Tensor) -> None:
        """Without attending."""
        self.cache.keys_NRGDL[layer][self.row_P, :, :, self.position_P] = k_SGD[self.rows_P]
        self.cache.values_NRGLD[layer][self.row_P, :, self.position_P] = v_SGD[self.rows_P]


def fill_cache(
    cache: Cache, batch: PackedBatch, rows: Sequence[int], lengths: Sequence[int], attend: AttendPacked
) -> FillCache:
    """Prepare to fill cache rows from position 0 with the first sequences of a pack, which have these lengths."""
    device, total = batch.row_of_S.device, sum(lengths)
    row_P = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths)).to(device)
    position_P = torch.cat([torch.arange(length) for length in lengths]).to(device)
    for row, length in zip(rows, lengths, strict=True):
        cache.lengths[row], cache.pinned[row] = length, None
    return FillCache(cache, attend, batch.row_of_S[:total], row_P, position_P)


class AttendExtended(Protocol):
    """Attention of a new position in each row of a cache that is extended: an `Attend` that knows the positions."""

    @property
    def position_X(self) -> Tensor:
        """The new position of each row of the model's batch."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        """`[S, H, D]`."""


@dataclass(frozen=True)
class AttendCached:
    """Attention of a new position in each of the first R cache rows over the positions that the row holds."""

    position_X: Tensor
    """The new position of each row of the model's batch."""
    new_at: tuple[Any, Any]
    """Rows and positions of the new entries in the cache; a single position where it is the same for all rows."""
    keys_NRGDL: Sequence[Tensor]
    """Cached keys of each layer, for the R rows being extended."""
    values_NRGLD: Sequence[Tensor]
    seen_keys_NBDL: Sequence[Tensor]
    """Keys of each layer at the positions visible to at least one row."""
    seen_values_NBLD: Sequence[Tensor]
    biases_NB1L: Sequence[Tensor | None]
    """Attention bias of each layer: -inf where a position is hidden from a row, else 0; None where none is hidden."""
    order_R: Tensor | None
    """The cache row of each row of the model's batch; None where they are in the cache's order."""
    rank_R: Tensor | None
    """Inverse of `order_R`."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        if self.rank_R is not None:
            q_SHD, k_SGD, v_SGD = (tensor.index_select(0, self.rank_R) for tensor in (q_SHD, k_SGD, v_SGD))
        row, position = self.new_at
        self.keys_NRGDL[layer][row, :, :, position] = k_SGD
        self.values_NRGLD[layer][row, :, position] = v_SGD
        keys_BDL, values_BLD = self.seen_keys_NBDL[layer], self.seen_values_NBLD[layer]
        q_BQD = q_SHD.reshape(len(keys_BDL), -1, q_SHD.shape[2])
        attended_RHD = cached_attention(q_BQD, keys_BDL, values_BLD, self.biases_NB1L[layer]).view(
            q_SHD.shape
        )
        return attended_RHD if self.order_R is None else attended_RHD.index_select(0, self.order_R)


def attend_cached(cache: Cache, rows: int, order_R: Tensor | None) -> AttendCached:
    """Prepare attention for a new position in each of the first `rows` rows, and count it as filled.

    Raises:
        ValueError: a row of the cache is full.
    """
    device, lengths = cache.keys_NRGDL.device, cache.claim_positions(rows)
    low, high = min(lengths), max(lengths)
    position_R = torch.tensor(lengths, device=device)
    keys_NRGDL, values_NRGLD = cache.keys_NRGDL[:, :rows], cache.values_NRGLD[:, :rows]
    same = low == high
    visible = {}
    for window in set(cache.windows):
        span = slice(0 if window is None else max(0, low - window + 1), high + 1)
        keys_NBDL = keys_NRGDL[..., span].flatten(1, 2).unbind()
        values_NBLD = values_NRGLD[:, :, :, span].flatten(1, 2).unbind()
        visible[window] = (
            keys_NBDL,
            values_NBLD,
            None if same else _window_bias(cache, window, position_R, span),
        )
    return AttendCached(
        position_R if order_R is None else position_R[order_R],
        (slice(None), low) if same else (torch.arange(rows, device=device), position_R),
        keys_NRGDL.unbind(),
        values_NRGLD.unbind(),
        [visible[window][0][layer] for layer, window in enumerate(cache.windows)],
        [visible[window][1][layer] for layer, window in enumerate(cache.windows)],
        [visible[window][2] for window in cache.windows],
        order_R,
        None if order_R is None else order_R.argsort(),
    )


def _window_bias(cache: Cache, window: int | None, position_R: Tensor, span: slice) -> Tensor:
    behind_RL = position_R[:, None] - torch.arange(span.start, span.stop, device=position_R.device)
    hidden_RL = behind_RL < 0 if window is None else (behind_RL < 0) | (behind_RL >= window)
    bias_RL = torch.zeros(hidden_RL.shape, dtype=cache.keys_NRGDL.dtype, device=position_R.device)
    bias_RL.masked_fill_(hidden_RL, -torch.inf)
    return bias_RL.repeat_interleave(cache.keys_NRGDL.shape[2], dim=0)[:, None]
