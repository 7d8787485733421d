"""Sums along the tokens of answers, from the last to the first: returns and generalised advantages.

Shapes: T tokens of all answers, flat; A answers; L tokens of the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.rl.policy_gradient.rollout_batch import token_layout


def discounted_sums(values_T: Tensor, answer_T: Tensor, num_answers: int, factor: float) -> Tensor:
    """Return `y_t = x_t + factor y_{t+1}` within each answer."""
    if not len(values_T):
        return values_T
    tokens = token_layout(answer_T, num_answers)
    padded_LA = values_T.new_zeros(int(tokens.position_E.max()) + 1, num_answers)
    padded_LA[tokens.position_E, tokens.item_E] = values_T[tokens.token_E]
    for place in range(len(padded_LA) - 2, -1, -1):
        padded_LA[place] += factor * padded_LA[place + 1]
    sums_T = torch.empty_like(values_T)
    sums_T[tokens.token_E] = padded_LA[tokens.position_E, tokens.item_E]
    return sums_T


def next_values(values_T: Tensor, answer_T: Tensor, num_answers: int) -> Tensor:
    """Return the value of the next token of the same answer; 0 after the last."""
    tokens = token_layout(answer_T, num_answers)
    values_E = values_T[tokens.token_E]
    next_E = torch.zeros_like(values_E)
    is_followed_E = tokens.item_E[1:] == tokens.item_E[:-1]
    next_E[:-1] = torch.where(is_followed_E, values_E[1:], 0.0)
    next_T = torch.empty_like(values_T)
    next_T[tokens.token_E] = next_E
    return next_T


def generalized_advantages(
    reward_T: Tensor, value_T: Tensor, answer_T: Tensor, num_answers: int, gamma: float, lam: float
) -> Tensor:
    """Return `A_t = sum over i of (gamma lam)^i (r_{t+i} + gamma V_{t+i+1} - V_{t+i})` (arXiv 1506.02438)."""
    error_T = reward_T + gamma * next_values(value_T, answer_T, num_answers) - value_T
    return discounted_sums(error_T, answer_T, num_answers, gamma * lam)
