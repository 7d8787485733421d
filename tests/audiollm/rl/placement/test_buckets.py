"""Weights that travel in buckets arrive bit for bit, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from audiollm.rl.placement.rollout_actors import buckets, bytes_of, tensor_hashes, write_bucket

TENSORS: list[tuple[str, Tensor]] = [
    ("float", torch.randn(5, 7)),
    ("half", torch.randn(3, 11).bfloat16()),
    ("count", torch.tensor(12_345_678_901)),
    ("mask", torch.tensor([True, False, True])),
    ("none", torch.zeros(0, 4)),
    ("double", torch.full((2, 2), torch.nan, dtype=torch.float64)),
]


@pytest.mark.parametrize("limit", [1, 3, 64, 140, 10_000])
def test_tensors_arrive_as_they_were(limit: int) -> None:
    made = list(buckets(iter(TENSORS), limit))
    total = sum(len(bytes_of(tensor)) for _, tensor in TENSORS)
    assert [len(each.data_B) for each in made[:-1]] == [limit] * (len(made) - 1)
    assert sum(len(each.data_B) for each in made) == total
    targets = {name: torch.ones_like(tensor) for name, tensor in TENSORS}
    for bucket in reversed(made):  # in any order
        write_bucket(bucket, targets)
    assert tensor_hashes(targets.items()) == tensor_hashes(TENSORS)


def test_buckets_do_not_share_memory() -> None:
    first, second, *_ = buckets(iter(TENSORS), 16)
    before = first.data_B.copy()
    second.data_B[:] = 0
    assert (first.data_B == before).all()


def test_another_model_is_refused() -> None:
    (bucket,) = buckets(iter(TENSORS[:1]), 1000)
    with pytest.raises(ValueError, match="no tensor 'float'"):
        write_bucket(bucket, {"other": torch.zeros(5, 7)})
    with pytest.raises(ValueError, match="140 bytes come, and the tensor has 136"):
        write_bucket(bucket, {"float": torch.zeros(34)})


def test_hashes_tell_bits_apart() -> None:
    zero = tensor_hashes([("a", torch.zeros(1))])
    assert zero != tensor_hashes([("a", -torch.zeros(1))])
    with pytest.raises(RuntimeError):
        tensor_hashes([("a", torch.zeros(2, 3).T)])
