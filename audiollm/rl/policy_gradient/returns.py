"""Sums along the tokens of answers, from the last to the first: returns and generalised advantages.

Shapes: T tokens of all answers, flat; A answers; L tokens of the longest; N actions (steps) of all answers, flat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import sum_by_index
from audiollm.rl.policy_gradient.rollout_batch import last_tokens, token_layout


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


@dataclass(frozen=True)
class TokenCredit:
    """Advantage and return of every token."""

    advantage_T: Tensor
    return_T: Tensor


def action_credit(
    reward_T: Tensor,
    value_T: Tensor,
    action_T: Tensor,
    answer_N: Tensor,
    num_answers: int,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> TokenCredit:
    """Return the credit of tokens where an action is one step: its reward is the sum over its tokens.

    The value of an action is that before its first token. A discount counts actions, so a long action is no later than
    a short one.

    Args:
        reward_T: rewards at tokens, KL penalties included.
        action_T: int64: number of each token's action, ascending in the order of the tokens of an answer.
        answer_N: int64: the answer of each action.
    """
    num_actions = len(answer_N)
    reward_N = sum_by_index(reward_T, action_T, num_actions)
    place_T = torch.arange(len(action_T), device=action_T.device)
    first_N = place_T.new_full((num_actions,), len(action_T)).scatter_reduce(0, action_T, place_T, "amin")
    value_N = value_T[first_N]
    advantage_N = generalized_advantages(reward_N, value_N, answer_N, num_answers, gamma, lam)
    return TokenCredit(advantage_N[action_T], (advantage_N + value_N)[action_T])


def actions_of_tokens(end_S: Tensor, answer_T: Tensor, num_answers: int) -> tuple[Tensor, Tensor]:
    """Return int64 `[T]` the action of each token, and `[N]` the answer of each action, from the tokens that end
    actions.

    The last token of an answer ends its last action in any case.
    """
    tokens = token_layout(answer_T, num_answers)
    is_end_T = last_tokens(answer_T, num_answers)
    is_end_T[end_S] = True
    is_end_E = is_end_T[tokens.token_E]
    action_E = is_end_E.long().cumsum(0) - is_end_E.long()
    action_T = torch.empty_like(action_E)
    action_T[tokens.token_E] = action_E
    return action_T, tokens.item_E[is_end_E]
