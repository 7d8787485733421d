"""Standard scores of rewards: over the batch of all ranks, or inside groups of rollouts.

The deviation is that of the population; where it is 0, so is the score. Entries that are not defined have no part in
mean and deviation, and a score of 0.

Shapes: B streams, N entries of a table of any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.interpret.rewards.stream_actions import RewardTable
from audiollm.rl.policy_gradient.moments import Moments


def table_moments(table: RewardTable) -> Moments:
    """Return count, sum and sum of squares of the defined entries. The training adds `sums` over packs and ranks."""
    return Moments.of(table.values[table.defined])


def standardized(table: RewardTable, moments: Moments) -> Tensor:
    """Return z of every entry, by the moments of the whole batch.

    Args:
        moments: of the tables of all ranks.
    """
    count, total, squares = moments.sums
    mean = total / count.clamp(min=1)
    variance = squares / count.clamp(min=1) - mean.square()
    is_rounding = variance <= 1e-13 * squares / count.clamp(min=1)
    return _standard_scores(table, mean, torch.where(is_rounding, 0.0, variance).sqrt())


def standardized_in_groups(table: RewardTable, group_B: Tensor, num_groups: int) -> Tensor:
    """Return z of every entry among the entries of its group, and for tables `[B, T]` of its chunk.

    Args:
        group_B: int64: the group of each stream.
    """
    weight = table.defined.double()
    shape = (num_groups, *table.values.shape[1:])
    count = torch.zeros(shape, dtype=torch.float64).index_add(0, group_B, weight)
    total = torch.zeros(shape, dtype=torch.float64).index_add(0, group_B, table.values * weight)
    mean = (total / count.clamp(min=1))[group_B]
    off = torch.where(table.defined, table.values - mean, 0.0)
    squares = torch.zeros(shape, dtype=torch.float64).index_add(0, group_B, off.square())
    deviation = (squares / count.clamp(min=1)).sqrt()[group_B]
    deviation = torch.where(deviation <= 1e-9 * mean.abs(), 0.0, deviation)
    return _standard_scores(table, mean, deviation)


def _standard_scores(table: RewardTable, mean: Tensor, deviation: Tensor) -> Tensor:
    is_scored = table.defined & (deviation > 0)
    return torch.where(is_scored, (table.values - mean) / torch.where(deviation > 0, deviation, 1.0), 0.0)
