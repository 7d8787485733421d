"""Weighted mixing and shuffling as arithmetic: the sample at item k of an endless stream.

Nothing is stored but k, so a checkpoint holds a step number, and any worker on any rank can ask for any item.

*Between sources*: items come in blocks of `B`. Each block holds every source's share of `B`, rounded down or up such
that what is owed is made good in the blocks that follow, in an order shuffled for each block. The shares repeat
after `P` blocks.

*Inside a source*: every pass takes each sample exactly once. A shuffled pass puts *runs* of consecutive samples in a
random order, and then shuffles the samples within windows of a few runs. A window is read from a few places of the
disk, each sequentially, and holds samples from all over the source.

Shapes: N samples of a source, R its runs, K items, S sources, B items a block, P blocks a period.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

_MAX_PERIOD = 1 << 16
_LEAST_ITEMS = 16
"""Items a period of the smallest source: its share is kept to a few percent."""
_LEAST_NATURAL_ITEMS = 4
"""The same where nobody has asked for a share and the sizes give it."""
_KEPT_ORDERS = 8
"""Shuffled orders kept a source, so that neighbouring items do not make them again."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class StepDraws:
    """How the samples of each step are drawn from sources, and how many are in memory at a time."""

    batch_size: int
    """Samples of a step, over all ranks."""
    seed: int = 0
    weights: Sequence[float] | None = None
    """The share of each source, relative to the others'; None: as many as it has."""
    max_tokens: int = 0
    """Tokens of a batch, for what makes batches."""


def evenly(count: int, max_count: int) -> list[int]:
    """Places of at most `max_count` of `count` things, evenly picked."""
    picked = min(max_count, count)
    return [number * count // picked for number in range(picked)]


class MixtureItem(NamedTuple):
    """A sample to read: its source, its number there, and how often the source has been passed through before."""

    source: int
    index: int  # type: ignore[assignment]  # the name that everyone uses; the method of tuple is not missed
    epoch: int


class Mixture:
    """An endless stream over sources of samples.

    Args:
        sizes: samples of each source.
        weights: shares of the stream, of any sum; 0 leaves a source out; None: in proportion to the sizes, where a
            source of less than a millionth counts as one of a millionth.
        seed: another one gives another order.
        shuffle: False takes the samples of a source in their order.
        run_samples: consecutive samples that stay close; 1 with `window_runs=1` shuffles a source as a whole.
        window_runs: runs that are shuffled together.

    Raises:
        ValueError: weights and sizes that do not go together, or a weight too small to be kept.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        run_samples: int = 64,
        window_runs: int = 16,
    ) -> None:
        if run_samples < 1 or window_runs < 1:
            raise ValueError("run_samples and window_runs must be at least 1")
        self.sizes = [int(size) for size in sizes]
        self.seed, self.shuffle = seed, shuffle
        self._run, self._window = run_samples, run_samples * window_runs
        self.block = max(64, 1 << (4 * len(self.sizes) - 1).bit_length())
        self._shares_S = _shares(self.sizes, weights, self.block)
        self._counts_PS = _schedule(self._shares_S, self.block)
        self._before_PS = np.cumsum(self._counts_PS, axis=0) - self._counts_PS
        self._orders: OrderedDict[Hashable, np.ndarray] = OrderedDict()

    def item(self, k: int) -> MixtureItem:
        """Item `k`."""
        return self.items(k, k + 1)[0]

    def items(self, start: int, stop: int) -> list[MixtureItem]:
        """Items `start` to `stop - 1`."""
        arrays = self.arrays(start, stop)
        return [MixtureItem(*row) for row in zip(*(array.tolist() for array in arrays), strict=True)]

    def arrays(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items `start` to `stop - 1` as three int64 arrays `[K]`: sources, indices, epochs.

        Raises:
            ValueError: a negative number, or a range that ends before it starts.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"invalid range of items: {start} to {stop}; items are counted from 0")
        blocks = range(start // self.block, -(-stop // self.block))
        block_draws = [self._block(block) for block in blocks]
        none = np.zeros(0, np.int64)
        sources_K = np.concatenate([none, *(sources for sources, _ in block_draws)])
        draws_K = np.concatenate([none, *(draws for _, draws in block_draws)])
        first = blocks.start * self.block
        sources_K, draws_K = sources_K[start - first : stop - first], draws_K[start - first : stop - first]
        sizes_K = np.array(self.sizes, np.int64)[sources_K]
        indices_K, epochs_K = np.empty_like(draws_K), draws_K // np.maximum(sizes_K, 1)
        for k, (source, draw, epoch) in enumerate(zip(sources_K, draws_K, epochs_K, strict=True)):
            indices_K[k] = self._index(int(source), int(epoch), int(draw) % self.sizes[source])
        return sources_K, indices_K, epochs_K

    def source_counts(self, k: int) -> np.ndarray:
        """Return the number of items from each source among the first `k`, int64 `[S]`."""
        counts_S = self._before(k // self.block)
        if k % self.block:
            sources_B, _ = self._block(k // self.block)
            counts_S += np.bincount(sources_B[: k % self.block], minlength=len(self.sizes))
        return counts_S

    def _before(self, block: int) -> np.ndarray:
        """Items of each source before a block."""
        periods, place = divmod(block, len(self._counts_PS))
        before_S: np.ndarray = periods * self._counts_PS.sum(axis=0) + self._before_PS[place]
        return before_S

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources of a block's items, and for each item how many of its source came before it: two `[B]`."""
        counts_S = self._counts_PS[block % len(self._counts_PS)]
        ordered_B = np.repeat(np.arange(len(counts_S)), counts_S)
        ranks_B = np.arange(self.block) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        # draws of one source rise with the items; only the places of the sources are shuffled
        sources_B = ordered_B[_draw_order(self.block, self.seed, 0, block)] if self._mixes else ordered_B
        draws_B = np.empty(self.block, np.int64)
        draws_B[np.argsort(sources_B, kind="stable")] = self._before(block)[ordered_B] + ranks_B
        return sources_B, draws_B

    @property
    def _mixes(self) -> bool:
        return bool(np.count_nonzero(self._shares_S) > 1)

    def _index(self, source: int, epoch: int, place: int) -> int:
        """The sample at a place of a pass."""
        if not self.shuffle:
            return place
        window = place // self._window
        indices = self._cached_order(
            source, (source, epoch, window), lambda: self._shuffled(source, epoch, window)
        )
        return int(indices[place % self._window])

    def _shuffled(self, source: int, epoch: int, window: int) -> np.ndarray:
        """The samples of a window of a pass, in their order there.

        The last run may be a short one. It stays last in the order of runs, so that a place tells its window, and
        the runs are turned round by a number drawn for the pass, so that the same samples do not always come last.
        """
        size = self.sizes[source]
        turn = int(_hash_numbers(np.zeros(1, np.uint64), self.seed, 1, source, epoch)[0] % np.uint64(size))
        runs_R = self._cached_order(source, (source, epoch), lambda: self._runs(source, epoch))
        per_window = self._window // self._run
        starts = runs_R[window * per_window : (window + 1) * per_window] * self._run
        places = (starts[:, None] + np.arange(self._run)).ravel()
        places = places[places < size]
        order = _draw_order(len(places), self.seed, 2, source, epoch, window)
        shuffled: np.ndarray = (places[order] + turn) % size
        return shuffled

    def _runs(self, source: int, epoch: int) -> np.ndarray:
        """The order of a source's runs in a pass, `[R]`; the short one, if any, is last."""
        num_full_runs, remainder = divmod(self.sizes[source], self._run)
        order = _draw_order(num_full_runs, self.seed, 3, source, epoch)
        return np.append(order, num_full_runs) if remainder else order

    def _cached_order(self, source: int, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key in self._orders:
            self._orders.move_to_end(key)
            return self._orders[key]
        self._orders[key] = order = make()
        while len(self._orders) > _KEPT_ORDERS * len(self.sizes):
            self._orders.popitem(last=False)
        return order


def _shares(sizes: Sequence[int], weights: Sequence[float] | None, block: int) -> np.ndarray:
    """Shares of the stream that add up to 1, `[S]`, each large enough to come in every period."""
    raw_weights = np.array(sizes if weights is None else weights, np.float64)
    if len(raw_weights) != len(sizes):
        raise ValueError(f"{len(raw_weights)} weights for {len(sizes)} sources: give one each")
    if (
        not len(raw_weights)
        or not np.isfinite(raw_weights).all()
        or (raw_weights < 0).any()
        or raw_weights.sum() <= 0
    ):
        raise ValueError(f"weights must be 0 or more, and not all 0: {raw_weights.tolist()}")
    for source, (size, weight) in enumerate(zip(sizes, raw_weights, strict=True)):
        if weight > 0 and size < 1:
            raise ValueError(f"source {source} has weight {weight:g} and no samples: leave it out")
    shares_S: np.ndarray = raw_weights / raw_weights.sum()
    smallest, longest = float(shares_S[shares_S > 0].min()), _MAX_PERIOD * block
    if weights is not None and smallest * longest < _LEAST_ITEMS:
        raise ValueError(f"a share of {smallest:.2g} is too small to be kept: join sources, or weigh it more")
    if weights is None and smallest * longest < _LEAST_NATURAL_ITEMS:
        shares_S = np.where(shares_S > 0, np.maximum(shares_S, _LEAST_NATURAL_ITEMS / longest), 0.0)
        shares_S /= shares_S.sum()
    return shares_S


def _schedule(shares_S: np.ndarray, block: int) -> np.ndarray:
    """Return the number of items of each source in each block of a period, int64 `[P, S]`.

    Every count is the share of the block rounded down or up; the ones rounded up are those that are owed most.
    """
    exact_S = shares_S * block
    base_S = np.floor(exact_S).astype(np.int64)
    extra = block - int(base_S.sum())
    if extra == 0:
        return base_S[None]
    smallest = float(shares_S[shares_S > 0].min())
    period = min(_MAX_PERIOD, 1 << max(6, math.ceil(math.log2(_LEAST_ITEMS / (smallest * block)))))
    counts_PS = np.empty((period, len(shares_S)), np.int64)
    owed_S = np.zeros(len(shares_S))
    for place in range(period):
        owed_S += exact_S - base_S
        counts_PS[place] = base_S
        rounded_up = np.argsort(-np.where(exact_S > base_S, owed_S, -np.inf), kind="stable")[:extra]
        counts_PS[place, rounded_up] += 1
        owed_S[rounded_up] -= 1
    return counts_PS


def _draw_order(length: int, *key: int) -> np.ndarray:
    """A permutation of `0 … length - 1` that depends on the key alone, on any machine and version of numpy."""
    return np.argsort(_hash_numbers(np.arange(length, dtype=np.uint64), *key), kind="stable")


def _hash_numbers(values: np.ndarray, *key: int) -> np.ndarray:
    """64 well mixed bits a value (SplitMix64's finalizer, Steele et al. 2014, chained over the key)."""
    state = np.zeros(1, np.uint64)
    for number in key:
        state = _mix(state ^ np.uint64(number & (2**64 - 1)))
    return _mix(_mix(values + state))


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
