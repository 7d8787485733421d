"""From several rewards to one number per action or per rollout: standard scores, and their sums.

| name | result |
|---|---|
| `sum_z` | R_t = sum of w_m z(r_m, t) + [t = T] sum of w_M z(r_M): Seed LiveInterpret 2.0 |
| `grouped` | R_t = sum of w_m z(r_m, t) + sum of w_M z(r_M): GRPO, also Hibiki-Zero's (arXiv 2602.11072) |
| `seqpo` | w_q z(q) - w_l max(m, z(L)): SeqPO-SiMT (arXiv 2505.20622: w_q = lambda, w_l = 1); L is a latency |
| `gated` | w_q z(mean q) - w_l z(mean gated latency): HPO (arXiv 2604.21045) |

`sum_z` standardises over the whole step, the others among the rollouts of a stream.

Shapes: B streams (rollouts), T chunks, S sentences of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.interpret.rewards.stream_actions import RewardTable
from audiollm.rl.policy_gradient.moments import Moments


def sum_z(
    of_actions: Mapping[str, RewardTable],
    of_sequences: Mapping[str, RewardTable],
    weights: Mapping[str, float],
    moments: Mapping[str, Moments],
    last_BT: Tensor,
) -> Tensor:
    """Return R `[B, T]`, the reward of each action.

    Args:
        weights: of every reward by name; a reward without one has no part.
        moments: of every reward by name, over all ranks.
        last_BT: bool: the last chunk of each stream, at which the rewards of its sequence stand.
    """
    total_BT = torch.zeros(last_BT.shape, dtype=torch.float64)
    for name, table in of_actions.items():
        total_BT += weights.get(name, 0.0) * standardized(table, moments[name])
    for name, table in of_sequences.items():
        score_B = weights.get(name, 0.0) * standardized(table, moments[name])
        total_BT += torch.where(last_BT, score_B[:, None], 0.0)
    return total_BT


def grouped(
    of_actions: Mapping[str, RewardTable],
    of_sequences: Mapping[str, RewardTable],
    weights: Mapping[str, float],
    exists_BT: Tensor,
    group_B: Tensor,
    num_groups: int,
) -> Tensor:
    """Return R `[B, T]`, the advantage of each action: rewards standardised among the rollouts of its stream.

    Rewards of actions are standardised chunk by chunk; those of a sequence are the same for all of its actions.

    Args:
        weights: of every reward by name; a reward without one has no part.
        exists_BT: bool: the chunks that each stream has.
        group_B: int64: the stream that each rollout belongs to.
    """
    total_BT = torch.zeros(exists_BT.shape, dtype=torch.float64)
    for name, table in of_actions.items():
        total_BT += weights.get(name, 0.0) * standardized_in_groups(table, group_B, num_groups)
    for name, table in of_sequences.items():
        score_B = weights.get(name, 0.0) * standardized_in_groups(table, group_B, num_groups)
        total_BT += torch.where(exists_BT, score_B[:, None], 0.0)
    return total_BT


def seqpo(
    quality: RewardTable,
    latency: RewardTable,
    group_B: Tensor,
    num_groups: int,
    quality_weight: float = 2.0,
    floor: float = -1.0,
    latency_weight: float = 1.0,
) -> Tensor:
    """Return `[B]` rewards of rollouts: a latency far below its group's mean earns no more than `floor` gives.

    Args:
        floor: m. The paper calls it the chunk size, which does not fit its unit; this default is ours.
    """
    quality_B = standardized_in_groups(quality, group_B, num_groups)
    latency_B = standardized_in_groups(latency, group_B, num_groups)
    return quality_weight * quality_B - latency_weight * latency_B.clamp(min=floor)


@dataclass(frozen=True)
class GateChoice:
    """Which latencies of sentences count, and the weights of both sides."""

    threshold: float = -5.0
    """Quality below which a sentence's latency does not count (MetricX: -5)."""
    max_latency: float = 10.0
    """Latency beyond which more costs nothing, in the unit of the latencies (seconds)."""
    quality_weight: float = 1.0
    latency_weight: float = 0.5


def gated_latency(quality_BS: Tensor, latency_BS: Tensor, threshold: float, max_latency: float) -> Tensor:
    """Return `[B, S]` latencies below `max_latency` as negative numbers; 0, the worst, where quality is too low."""
    return torch.where(quality_BS < threshold, 0.0, (latency_BS - max_latency).clamp(max=0.0))


def gated(
    quality_BS: Tensor,
    latency_BS: Tensor,
    defined_BS: Tensor,
    group_B: Tensor,
    num_groups: int,
    choice: GateChoice | None = None,
) -> Tensor:
    """Return `[B]` rewards of rollouts from the quality and latency of their sentences."""
    choice = choice or GateChoice()
    gate_BS = gated_latency(quality_BS, latency_BS, choice.threshold, choice.max_latency)
    count_B = defined_BS.double().sum(1)
    means = [
        torch.where(defined_BS, values_BS, 0.0).sum(1) / count_B.clamp(min=1)
        for values_BS in (quality_BS, gate_BS)
    ]
    scores = [
        standardized_in_groups(RewardTable(mean_B.double(), count_B > 0), group_B, num_groups)
        for mean_B in means
    ]
    return choice.quality_weight * scores[0] - choice.latency_weight * scores[1]


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
