"""Rewards before they become advantages: KL penalties, length penalties, groups that teach nothing.

Shapes: A answers, T tokens of all answers, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import sum_by_index
from audiollm.rl.policy_gradient.rollout_batch import last_tokens
from audiollm.rl.policy_gradient.settings import TokenRewardSettings


def penalized_rewards(
    reward_A: Tensor, kl_T: Tensor, answer_T: Tensor, coefficient: float | Tensor
) -> Tensor:
    """Return each answer's reward minus `coefficient` times its summed KL (RLOO, with `kl_estimates` at k1)."""
    return reward_A - coefficient * sum_by_index(kl_T.detach().to(reward_A), answer_T, len(reward_A))


def token_rewards(
    score_A: Tensor,
    kl_T: Tensor | None,
    answer_T: Tensor,
    coefficient: float | Tensor,
    settings: TokenRewardSettings,
) -> Tensor:
    """Return `[T]` rewards: `-coefficient KL_t` at every token, and the clipped score at the last.

    Source: DeepSpeed-Chat's `compute_rewards`, with coefficient 0.1, k1 (`kl_estimates`) and scores cut to +-5.
    NaN scores stay NaN.

    Args:
        kl_T: KL of old to the reference at each token; None: no penalty.
    """
    bound = settings.score_clip
    score_A = score_A if bound is None else score_A.clamp(-bound, bound)
    score_T = torch.where(last_tokens(answer_T, len(score_A)), score_A[answer_T], 0.0)
    return score_T if kl_T is None else score_T - coefficient * kl_T.detach().to(score_T)


def overlong_penalty(lengths_A: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Return DAPO's penalty: 0 up to `max_tokens - buffer`, linear down to -1 at `max_tokens`, -1 beyond.

    Source: arXiv 2503.14476, equation 13.

    Raises:
        ValueError: `buffer` is not in [1, max_tokens].
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be from 1 to max_tokens ({max_tokens}), not {buffer}")
    return ((max_tokens - buffer - lengths_A) / buffer).clamp(-1, 0)


def trained_answers(reward_A: Tensor, truncated_A: Tensor | None = None) -> Tensor:
    """Return bool `[A]`: answers that have a reward and, where `truncated_A` is given, were not cut off."""
    scored_A = ~reward_A.isnan()
    return scored_A if truncated_A is None else scored_A & ~truncated_A


def groups_without_variance(reward_A: Tensor, group_A: Tensor, num_groups: int) -> Tensor:
    """Return bool `[G]`: groups whose rewards are all equal, or that have fewer than two."""
    low_G, high_G = group_range(reward_A, group_A, num_groups)
    return low_G >= high_G


def group_range(reward_A: Tensor, group_A: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest reward of each group; infinity and -infinity without any."""
    scored_A = ~reward_A.isnan()
    low_G = reward_A.new_full((num_groups,), torch.inf)
    high_G = reward_A.new_full((num_groups,), -torch.inf)
    low_G = low_G.scatter_reduce(0, group_A[scored_A], reward_A[scored_A], "amin")
    high_G = high_G.scatter_reduce(0, group_A[scored_A], reward_A[scored_A], "amax")
    return low_G, high_G
