"""Attention of several new rows at once, to cache rows of different lengths, some of which forget.

A cache row that forgets (`Cache.keep_prefix`) has places for its prefix, and a ring for the rows after it: position p
lies at place P + (p - P) mod (L - P). What a row sees is decided by positions, as in `attention.py`; the order of
places does not matter. Memory and time of a step depend on the window alone, however long the stream.

What all layers need is computed once per step, on the host: a step of one row takes about as long as its small
operations are many.

Shapes: U cache rows that are looked at, Q new positions of the row with the most, F new positions of all (row after
row), X the same in the model's order (text first), L cache length, H heads, G key and value heads, B both rows and
these heads (U x G), D head dimension, P the largest kept prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.models.attention import RopeScaling, rotary_frequencies, rotate
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig

MAX_ROWS_PER_ACTIVE = 3
"""Rows of the cache that are looked at for each one with new positions: to gather single rows costs three readings."""
MAX_RUNS = 4
"""Runs of neighbouring places up to which each is a copy of its own; more of them are written by index."""

Run = tuple[int, slice, slice]
"""A row of the cache, places in it, and the new positions that lie there."""


@dataclass(frozen=True)
class PrefixTurn:
    """Rotation of the queries against the kept prefixes."""

    cosine_F1D: Tensor
    sine_F1D: Tensor
    width: int
    """P: places of the largest prefix."""
    is_prefix_UP: Tensor | None
    """Which of these places are a row's prefix; None: all of them, in every row."""


@dataclass(frozen=True)
class AttendAppended:
    """Attention of new positions over what their rows of the cache hold, the new positions included."""

    cosine_XD: Tensor
    """Rotary cosines of the new positions, in the model's order."""
    sine_XD: Tensor
    keys_NRGDL: Sequence[Tensor]
    """Cached keys of each layer."""
    values_NRGLD: Sequence[Tensor]
    windows: Sequence[int | None]
    """Sliding window of each layer."""
    runs: Sequence[Run]
    """Where new positions are written; empty: by `row_F` and `place_F`."""
    row_F: Tensor
    """Cache row of each new position."""
    place_F: Tensor
    """Place of each new position in its cache row."""
    rows_U: Tensor | None
    """Cache rows that are looked at; None: the first U ones, some of them perhaps without new positions."""
    query_F: Tensor | None
    """Place of each new position among the padded queries; None: they have no padding, and are in that order."""
    counts: tuple[int, int, int]
    """U, Q, and the places that are looked at."""
    biases: dict[int | None, Tensor | None]
    """For each window, -inf where a place is hidden from a query, else 0: `[U, Q, L]`; None where none is hidden."""
    turn: PrefixTurn | None
    """None where no query is turned."""
    order_X: Tensor | None
    """The number among F of each row of the model's batch; None where they are in that order."""
    rank_F: Tensor | None
    """Inverse of `order_X`."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        if self.rank_F is not None:
            q_SHD, k_SGD, v_SGD = (tensor.index_select(0, self.rank_F) for tensor in (q_SHD, k_SGD, v_SGD))
        keys_RGDL, values_RGLD = self.keys_NRGDL[layer], self.values_NRGLD[layer]
        self._write(keys_RGDL, values_RGLD, k_SGD, v_SGD)
        rows, width, span = self.counts
        groups, shared = k_SGD.shape[1], q_SHD.shape[1] // k_SGD.shape[1]
        if self.rows_U is None:
            keys_UGDL, values_UGLD = keys_RGDL[:rows, ..., :span], values_RGLD[:rows, :, :span]
        else:
            keys_UGDL, values_UGLD = keys_RGDL[self.rows_U, ..., :span], values_RGLD[self.rows_U, :, :span]
        keys_BDL, values_BLD = keys_UGDL.flatten(0, 1), values_UGLD.flatten(0, 1)
        q_SHD = q_SHD * q_SHD.shape[2] ** -0.5
        scores_UGQL = self._scores(q_SHD, keys_BDL)
        bias_UQL = self.biases[self.windows[layer]]
        if bias_UQL is not None and shared > 1:
            bias_UQL = bias_UQL.repeat_interleave(shared, 1)
        if self.turn is not None and self.windows[layer] is not None:
            turn = self.turn
            far_UGQP = self._scores(
                rotate(q_SHD, turn.cosine_F1D, turn.sine_F1D), keys_BDL[..., : turn.width]
            )
            if turn.is_prefix_UP is not None:
                near_UGQP = scores_UGQL[..., : turn.width]
                far_UGQP = torch.where(turn.is_prefix_UP[:, None, None], far_UGQP, near_UGQP)
            scores_UGQL[..., : turn.width] = far_UGQP
        if bias_UQL is not None:
            scores_UGQL.add_(bias_UQL[:, None])
        out_BQD = torch.bmm(scores_UGQL.flatten(0, 1).softmax(-1).to(values_BLD.dtype), values_BLD)
        if self.query_F is None and width == 1:
            attended_FHD = out_BQD.view(rows, groups * shared, -1)
        else:
            out_UQHD = out_BQD.view(rows, groups, width, shared, -1).permute(0, 2, 1, 3, 4)
            attended_FHD = out_UQHD.reshape(rows * width, groups * shared, -1)
        if self.query_F is not None:
            attended_FHD = attended_FHD.index_select(0, self.query_F)
        return attended_FHD if self.order_X is None else attended_FHD.index_select(0, self.order_X)

    def _write(self, keys_RGDL: Tensor, values_RGLD: Tensor, k_FGD: Tensor, v_FGD: Tensor) -> None:
        for row, places, new_rows in self.runs:
            keys_RGDL[row, :, :, places] = k_FGD[new_rows].permute(1, 2, 0)
            values_RGLD[row, :, places] = v_FGD[new_rows].transpose(0, 1)
        if not self.runs:
            keys_RGDL[self.row_F, :, :, self.place_F] = k_FGD
            values_RGLD[self.row_F, :, self.place_F] = v_FGD

    def _scores(self, q_FHD: Tensor, keys_BDL: Tensor) -> Tensor:
        """Return scores `[U, G, Q x heads per key head, L]`, float32 for half precision."""
        rows, width, _ = self.counts
        groups = len(keys_BDL) // rows
        if self.query_F is not None:
            empty = q_FHD.new_zeros(rows * width, *q_FHD.shape[1:])
            q_FHD = empty.index_copy_(0, self.query_F, q_FHD)
        if width == 1:
            q_BQD = q_FHD.reshape(len(keys_BDL), -1, q_FHD.shape[2])
        else:
            q_UQGSD = q_FHD.view(rows, width, groups, -1, q_FHD.shape[2])
            q_BQD = q_UQGSD.permute(0, 2, 1, 3, 4).reshape(len(keys_BDL), -1, q_FHD.shape[2])
        scores = torch.bmm(q_BQD, keys_BDL).unflatten(0, (rows, groups))
        return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def append_cached(
    cache: Cache, config: DualFFNConfig, counts: Sequence[int], order_X: Tensor | None
) -> AttendAppended:
    """Prepare attention for `counts[r]` new positions of cache row r, and count them as filled.

    Args:
        order_X: the number, among the new positions row after row, of each row of the model's batch.

    Raises:
        ValueError: no new position, a row is full, or more new positions than a row that forgets has room for.
    """
    device = cache.keys_NRGDL.device
    active = [row for row, count in enumerate(counts) if count]
    if not active:
        raise ValueError("there are no new positions")
    for row in active:
        cache.check_room(row, counts[row])
    in_order = active[-1] + 1 <= MAX_ROWS_PER_ACTIVE * len(active)
    rows = list(range(active[-1] + 1)) if in_order else active
    count_U = np.array([counts[row] for row in rows])
    before_U = np.array([cache.lengths[row] for row in rows])
    for row in active:
        cache.lengths[row] += counts[row]
    width, after_U = int(count_U.max()), before_U + count_U
    number_F = np.repeat(np.arange(len(rows)), count_U)
    offset_F = np.arange(len(number_F)) - np.repeat(np.cumsum(count_U) - count_U, count_U)
    position_F = before_U[number_F] + offset_F
    kept_U = np.array([cache.pinned[row] or 0 for row in rows])
    ring_U = cache.length - kept_U
    place_F = _place_positions(position_F, kept_U[number_F], ring_U[number_F])
    span = min(int(after_U.max()), cache.length)
    held_UL = _held_positions(after_U, kept_U, ring_U, span)
    position_UQ = np.full((len(rows), width), -1)
    position_UQ[number_F, offset_F] = position_F
    prefix = int(kept_U.max())
    is_prefix_UL = np.arange(span) < kept_U[:, None]
    dtype = torch.float64 if cache.keys_NRGDL.dtype == torch.float64 else torch.float32
    biases: dict[int | None, Tensor | None] = {}
    for window in set(cache.windows):
        bias_UQL = _appended_bias(window, position_UQ, held_UL, is_prefix_UL)
        biases[window] = None if bias_UQL is None else torch.from_numpy(bias_UQL).to(device, dtype)
    rotary = config.head_dim, config.rope_theta, config.rope_scaling
    back_F = _turn_for_prefix(position_F, kept_U[number_F], config.sliding_window)
    cosine, sine = _angles(np.concatenate([position_F, back_F]), *rotary)
    fresh = len(position_F)
    cosine_FD, sine_FD = (torch.from_numpy(table[:fresh]).to(device) for table in (cosine, sine))
    turn = None
    if back_F.any():
        is_prefix_UP = (
            None if bool((kept_U == prefix).all()) else torch.from_numpy(is_prefix_UL[:, :prefix]).to(device)
        )
        turned_cosine, turned_sine = (
            torch.from_numpy(table[fresh:, None]).to(device) for table in (cosine, sine)
        )
        turn = PrefixTurn(turned_cosine, turned_sine, prefix, is_prefix_UP)
    row_F = np.array(rows)[number_F]
    return AttendAppended(
        cosine_FD if order_X is None else cosine_FD[order_X],
        sine_FD if order_X is None else sine_FD[order_X],
        cache.keys_NRGDL.unbind(),
        cache.values_NRGLD.unbind(),
        cache.windows,
        _contiguous_runs(row_F, place_F),
        torch.from_numpy(row_F).to(device),
        torch.from_numpy(place_F).to(device),
        None if in_order else torch.tensor(rows, device=device),
        None if bool((count_U == width).all()) else torch.from_numpy(number_F * width + offset_F).to(device),
        (len(rows), width, span),
        biases,
        turn,
        order_X,
        None if order_X is None else order_X.argsort(),
    )


# Private


def _place_positions(
    position_F: NDArray[np.int64], kept_F: NDArray[np.int64], ring_F: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the place of each position: the position itself, or in the ring behind a kept prefix."""
    return np.where(position_F < kept_F, position_F, kept_F + (position_F - kept_F) % ring_F)


def _held_positions(
    length_U: NDArray[np.int64], kept_U: NDArray[np.int64], ring_U: NDArray[np.int64], span: int
) -> NDArray[np.int64]:
    """Return the position that each of the first places of rows holds; -1 for an empty one."""
    place_L = np.arange(span)
    length_U1, ring_U1 = length_U[:, None], ring_U[:, None]
    latest_UL = place_L + ring_U1 * ((length_U1 - 1 - place_L) // ring_U1)
    held_UL = np.where(place_L < kept_U[:, None], place_L, latest_UL)
    held_UL[place_L >= length_U1] = -1
    return held_UL


def _contiguous_runs(row_F: NDArray[np.int64], place_F: NDArray[np.int64]) -> list[Run]:
    """Return runs of neighbouring places; none where there are more than `MAX_RUNS`."""
    ends = np.flatnonzero((np.diff(row_F) != 0) | (np.diff(place_F) != 1)) + 1
    if len(ends) >= MAX_RUNS:
        return []
    bounds = [0, *ends.tolist(), len(row_F)]
    runs = []
    for first, end in pairwise(bounds):
        place = int(place_F[first])
        runs.append((int(row_F[first]), slice(place, place + end - first), slice(first, end)))
    return runs


def _appended_bias(
    window: int | None,
    position_UQ: NDArray[np.int64],
    held_UL: NDArray[np.int64],
    is_prefix_UL: NDArray[np.bool_],
) -> NDArray[np.float32] | None:
    """Return 0 where a query sees a place, and -inf where it does not; None where each sees all."""
    behind_UQL = position_UQ[:, :, None] - held_UL[:, None]
    hidden_UQL = (held_UL < 0)[:, None] | (behind_UQL < 0)
    if window is not None:
        hidden_UQL |= (behind_UQL >= window) & ~is_prefix_UL[:, None]
    hidden_UQL[position_UQ < 0] = False  # padding, whose output is not read
    if not hidden_UQL.any():
        return None
    bias_UQL = np.zeros(hidden_UQL.shape, dtype=np.float32)
    bias_UQL[hidden_UQL] = -np.inf
    return bias_UQL


def _turn_for_prefix(
    position_F: NDArray[np.int64], kept_F: NDArray[np.int64], window: int | None
) -> NDArray[np.int64]:
    """Return how far each query is turned for its prefix, as `attention.prefix_turns`."""
    if window is None:
        return np.zeros_like(position_F)
    return np.where(kept_F > 0, np.minimum(position_F, kept_F + window - 1) - position_F, 0)


def _angles(
    positions_F: NDArray[np.int64], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine `[F, D]` of positions, as `attention.exact_rotary_angles`, by NumPy."""
    angles = positions_F[:, None] * _frequencies(head_dim, theta, scaling)
    doubled = np.concatenate([angles, angles], axis=1)
    return np.cos(doubled).astype(np.float32), np.sin(doubled).astype(np.float32)


@lru_cache(maxsize=16)
def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> NDArray[np.float64]:
    frequencies = rotary_frequencies(head_dim, theta, scaling, torch.device("cpu")).double().numpy()
    assert isinstance(frequencies, np.ndarray)
    return frequencies
