"""The entropy of a step's tokens, before its updates: the mean, and the threshold of the tokens that are trained on.

Shapes: T tokens of a pack, N tokens that count of all packs and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from audiollm.recipe.ranks import Ranks
from audiollm.rl.policy_gradient.losses import entropy_threshold


def mean_entropy(packs: Sequence[Tensor], ranks: Ranks) -> float:
    """Return the mean entropy per token of the step; 0 without tokens. Called on every rank.

    Args:
        packs: entropies `[T]` of the tokens that count, pack by pack.
    """
    entropy_T = torch.cat([pack_T.double() for pack_T in packs])
    sums = ranks.sum(torch.stack([entropy_T.sum(), entropy_T.new_tensor(float(len(entropy_T)))]))
    return float(sums[0] / sums[1].clamp(min=1))


def step_threshold(packs: Sequence[Tensor], share: float, ranks: Ranks) -> Tensor:
    """Return the entropy above which the given share of the step's tokens lies. Called on every rank.

    It lies halfway between the lowest entropy above and the highest below, so that a token is on the same side of it
    whatever pack it is computed in: its entropy differs there by rounding.

    Args:
        packs: entropies `[T]` of the tokens that count, pack by pack.
        share: share of the tokens, in (0, 1].
    """
    local_values = [value for pack_T in packs for value in pack_T.double().tolist()]
    every = torch.tensor(
        [value for rank_values in ranks.gather(local_values) for value in rank_values], dtype=torch.float64
    )
    threshold = entropy_threshold(every, share)
    above_N, below_N = every[every >= threshold], every[every < threshold]
    return (above_N.min() + below_N.max()) / 2 if len(below_N) else torch.zeros_like(threshold)
