"""Rows of a cache that are moved and copied: what they hold, and how much of it is filled."""

from __future__ import annotations

import torch

from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig

SHAPE = DualFFNConfig(
    vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8
)
LENGTH = 6


def filled_cache() -> Cache:
    """Three rows with 4, 2 and 9 positions; the last one is a ring that has gone round."""
    cache = Cache.empty(SHAPE, 3, LENGTH, torch.device("cpu"))
    torch.manual_seed(0)
    cache.keys_NRGDL.normal_()
    cache.values_NRGLD.normal_()
    cache.lengths = [4, 2, 9]
    return cache


def row_of(cache: Cache, row: int, filled: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys_NRGDL[:, row, ..., :filled].clone(), cache.values_NRGLD[:, row, :, :filled].clone()


def test_a_moved_row_has_the_length_of_its_source() -> None:
    cache = filled_cache()
    keys, values = row_of(cache, 2, LENGTH)
    cache.move(2, 0)
    assert list(cache.lengths) == [9, 2, 9]
    for found, expected in zip(row_of(cache, 0, LENGTH), (keys, values), strict=True):
        assert torch.equal(found, expected)


def test_a_row_that_is_copied_in_part_holds_that_part() -> None:
    cache = filled_cache()
    keys, values = row_of(cache, 0, 3)
    cache.copy(0, 1, 3)
    assert list(cache.lengths) == [4, 3, 9]
    for found, expected in zip(row_of(cache, 1, 3), (keys, values), strict=True):
        assert torch.equal(found, expected)
