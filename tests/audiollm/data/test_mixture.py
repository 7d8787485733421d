"""The stream of items: nothing lost, nothing twice in a pass, weights kept, however one asks for it."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.data.records.mixture import Mixture, MixtureItem

_sources = st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 1.0)), min_size=1, max_size=4)
_shape = st.tuples(st.integers(1, 40), st.integers(1, 5))


def mixture(sources: list[tuple[int, float]], seed: int, shape: tuple[int, int], shuffle: bool) -> Mixture:
    sizes, weights = zip(*sources, strict=True)
    return Mixture(sizes, weights, seed, shuffle, run_samples=shape[0], window_runs=shape[1])


def items_for(mixed: Mixture, passes: int) -> int:
    """Enough items to go through every source so often, in whole blocks."""
    items = mixed.block
    while (mixed.source_counts(items) < passes * np.array(mixed.sizes)).any():
        items += mixed.block
    return items


@settings(max_examples=60)
@given(_sources, st.integers(0, 2**40), _shape, st.booleans())
def test_each_pass_takes_every_sample_exactly_once(
    sources: list[tuple[int, float]], seed: int, shape: tuple[int, int], shuffle: bool
) -> None:
    mixed = mixture(sources, seed, shape, shuffle)
    seen: Counter[tuple[int, int, int]] = Counter()
    stop = items_for(mixed, 2)
    order: dict[int, list[int]] = {}
    for item in mixed.items(0, stop):
        seen[item] += 1
        order.setdefault(item.source, []).append(item.epoch)
    assert max(seen.values()) == 1
    for source, (size, _) in enumerate(sources):
        assert order[source] == sorted(order[source]), "a pass begins when the one before it is through"
        for epoch in (0, 1):
            assert {i for s, i, e in seen if (s, e) == (source, epoch)} == set(range(size))


@settings(max_examples=60)
@given(_sources, st.integers(0, 99), st.integers(0, 3000))
def test_weights_hold_within_one_item_a_block_and_do_not_drift(
    sources: list[tuple[int, float]], seed: int, first: int
) -> None:
    mixed = mixture(sources, seed, (7, 3), True)
    shares_S = np.array([weight for _, weight in sources]) / sum(weight for _, weight in sources)
    taken, _, _ = mixed.arrays(first * mixed.block, (first + 1) * mixed.block)
    counts_S = np.bincount(taken, minlength=len(sources))
    assert np.abs(counts_S - shares_S * mixed.block).max() < 1 + 1e-6
    # from the beginning: the rounding is made good within a period, whose own error is about an item
    blocks = 200
    drift_S = np.abs(mixed.source_counts(blocks * mixed.block) - shares_S * blocks * mixed.block)
    assert drift_S.max() < 2 + blocks * mixed.block * shares_S.max() / 1000


@settings(max_examples=40)
@given(
    _sources, st.integers(0, 99), st.lists(st.integers(0, 5000), min_size=1, max_size=8), st.integers(1, 90)
)
def test_an_item_does_not_depend_on_how_one_comes_to_it(
    sources: list[tuple[int, float]], seed: int, asked: list[int], length: int
) -> None:
    mixed = mixture(sources, seed, (16, 4), True)
    one_by_one = {k: mixed.item(k) for k in asked}
    for k in reversed(asked):
        fresh = pickle.loads(pickle.dumps(mixture(sources, seed, (16, 4), True)))  # noqa: S301
        assert fresh.items(k, k + length)[0] == one_by_one[k]
        start = max(0, k - length)
        assert mixed.items(start, k + 1)[-1] == one_by_one[k]
        before, after = mixed.source_counts(k), mixed.source_counts(k + 1)
        assert after.sum() == k + 1 and after[one_by_one[k].source] - before[one_by_one[k].source] == 1


def test_the_order_is_that_of_every_other_machine() -> None:
    """A run goes on elsewhere, so the order must not follow numpy's version: these figures are frozen."""
    mixed = Mixture([5, 1000], [1, 3], seed=7, run_samples=8, window_runs=2)
    assert mixed.items(0, 6) == [
        MixtureItem(*row)
        for row in [(1, 649, 0), (1, 643, 0), (0, 4, 0), (1, 520, 0), (1, 646, 0), (0, 3, 0)]
    ]
    assert mixed.items(10**12, 10**12 + 2) == [
        MixtureItem(*row) for row in [(1, 872, 750000000), (1, 296, 750000000)]
    ]


def test_unshuffled_and_seeds() -> None:
    plain = Mixture([4], shuffle=False)
    assert [item.index for item in plain.items(0, 10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert plain.item(9) == MixtureItem(0, 1, 2)
    orders = [[item.index for item in Mixture([500], seed=s).items(0, 500)] for s in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    again = [item.index for item in Mixture([500], seed=0).items(500, 1000)]
    assert again != orders[0], "another pass, another order"


def test_a_shuffled_pass_is_uniform_and_local() -> None:
    """Every sample comes anywhere in the pass, and yet neighbours in the stream are near one another on the disk."""
    size, run, windows = 6400, 64, 4
    places = np.empty((40, size))
    for seed in range(40):
        mixed = Mixture([size], seed=seed, run_samples=run, window_runs=windows)
        _, indices, _ = mixed.arrays(0, size)
        places[seed, indices] = np.arange(size)
        for start in range(0, size, run * windows):
            window = np.sort(indices[start : start + run * windows])
            assert (np.diff(window) > 1).sum() <= windows, "a window is a few runs of neighbours"
    # the mean place of a sample over seeds: (size - 1) / 2, standard error size / sqrt(12 * 40)
    error = (places.mean(axis=0) - (size - 1) / 2) / (size / np.sqrt(12 * 40))
    assert 0.9 < error.std() < 1.1 and abs(error.mean()) < 0.01


def test_a_whole_shuffle_draws_all_permutations_alike() -> None:
    drawn = Counter(
        tuple(item.index for item in Mixture([4], seed=seed, run_samples=1, window_runs=1).items(0, 4))
        for seed in range(2400)
    )
    assert len(drawn) == 24
    expected = 100
    chi_square = sum((count - expected) ** 2 / expected for count in drawn.values())
    assert chi_square < 49.7, "23 degrees of freedom, p = 0.001"


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([3], [1, 2], "2 weights for 1 sources"),
        ([3], [0], "not all 0"),
        ([3, 3], [1, -1], "0 or more"),
        ([3, 0], [1, 1], "source 1 has weight 1 and no samples"),
        ([], None, "not all 0"),
        ([3, 3], [1, 1e-9], "too small"),
    ],
)
def test_what_does_not_go_together(sizes: list[int], weights: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(sizes, weights)


@pytest.mark.parametrize("sizes", [[10_000_000, 20], [10**9, 3], [10**9, 1, 2, 0, 10**8, 1, 1]])
def test_a_small_source_beside_a_huge_one_is_kept_where_nobody_weighs_them(sizes: list[int]) -> None:
    mixed = Mixture(sizes)
    stop = 10 * 4 * 10**6
    shares_S = mixed.source_counts(stop) / stop
    for share, size in zip(shares_S, sizes, strict=True):
        natural = size / sum(sizes)
        assert share == pytest.approx(max(natural, 1e-6) if size else 0.0, rel=0.15)
    stop = int(1.1 * sum(sizes))
    assert (mixed.source_counts(stop) >= sizes).all(), "a pass through all is hardly longer"


def test_sources_of_no_weight_are_left_out() -> None:
    mixed = Mixture([10, 20, 0], [1, 0, 0])
    assert {item.source for item in mixed.items(0, 500)} == {0}
    assert mixed.source_counts(500).tolist() == [500, 0, 0]
    with pytest.raises(ValueError, match="counted from 0"):
        mixed.items(-1, 2)
