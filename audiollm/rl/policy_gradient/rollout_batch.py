"""Inputs of advantages and policy objectives: rewards and log-probabilities of sampled answers.

Shapes: T tokens of all answers of a call, flat; A answers; G groups, each the answers to one prompt; F reward
functions; S steps of reasoning. Answers are whole, and so are groups where an advantage reads `group_A`. Tokens of an
answer stand in their order; answers may be interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemTokens, required_tensor, sum_by_index
from audiollm.rl.policy_gradient.corrections import ImportanceWeights


@dataclass(frozen=True)
class RolloutRewards:
    """Rewards of sampled answers. NaN is a reward that is missing: it leaves the baselines, and its answer the loss.

    Raises:
        ValueError: fields whose shapes do not fit together.
    """

    answer_T: Tensor
    """int64: the answer that each token belongs to."""
    num_answers: int
    group_A: Tensor | None = None
    """int64: the group of each answer."""
    num_groups: int = 0
    reward_A: Tensor | None = None
    """Reward of each answer: the weighted sum over its functions."""
    reward_AF: Tensor | None = None
    """Reward of each answer by each function (GDPO)."""
    weight_F: Tensor | None = None
    """Weight of each function (GDPO)."""
    greedy_reward_G: Tensor | None = None
    """Reward of the greedy answer to each group's prompt (ReMax)."""
    reward_T: Tensor | None = None
    """Reward at each token (`token_rewards`); NaN on any token is a missing reward of its answer."""
    value_T: Tensor | None = None
    """The critic's value before each token is chosen, from before the updates (GAE)."""
    step_reward_S: Tensor | None = None
    """Reward of each step of reasoning (process GRPO)."""
    step_end_S: Tensor | None = None
    """int64: place in T of the last token of each step."""
    is_outcome_S: Tensor | None = None
    """bool: steps that are the outcome of a whole answer, which has a baseline of its own; None: no step is."""

    def __post_init__(self) -> None:
        tokens, answers = self.answer_T.shape, torch.Size([self.num_answers])
        for name in ("reward_T", "value_T"):
            _check_shape(name, getattr(self, name), tokens)
        for name in ("group_A", "reward_A"):
            _check_shape(name, getattr(self, name), answers)
        _check_shape("greedy_reward_G", self.greedy_reward_G, torch.Size([self.num_groups]))
        if self.reward_AF is not None and self.weight_F is not None:
            _check_shape("reward_AF", self.reward_AF, torch.Size([self.num_answers, len(self.weight_F)]))
        if self.step_reward_S is not None:
            _check_shape("step_end_S", self.step_end_S, self.step_reward_S.shape)
            _check_shape("is_outcome_S", self.is_outcome_S, self.step_reward_S.shape)

    def required(self, name: str) -> Tensor:
        """Return the field `name`.

        Raises:
            ValueError: the field is None.
        """
        return required_tensor(self, name, f"this advantage reads {name}, which was not given")


@dataclass(frozen=True)
class RolloutLogprobs:
    """Log-probabilities of sampled tokens, with their advantages.

    Raises:
        ValueError: fields whose shapes do not fit together.
    """

    policy_T: Tensor
    """Under the policy now, with gradient (current)."""
    answer_T: Tensor
    """int64: the answer that each token belongs to."""
    num_answers: int
    advantage_T: Tensor
    """Advantage of each token, without gradient."""
    old_T: Tensor | None = None
    """Under the policy before the updates on these tokens; None: `policy_T` without gradient (the first update)."""
    reference_T: Tensor | None = None
    """Under the reference (KL in the loss)."""
    entropy_T: Tensor | None = None
    """Entropy of the policy's distribution at each token, with gradient (entropy bonus, top-entropy tokens)."""
    kept_T: Tensor | None = None
    """bool: tokens that count, in sums and denominators; None: all. Of kept answers: `kept_A[answer_T]`."""
    correction: ImportanceWeights | None = None
    """Weights for tokens that were sampled under another distribution than old; None: all 1."""
    is_code_T: Tensor | None = None
    """bool: tokens that are codes of speech, whose KL is told apart; None: it is not."""
    old_entropy_T: Tensor | None = None
    """Entropy before the updates, by which top-entropy tokens are chosen; None: `entropy_T`."""

    def __post_init__(self) -> None:
        for name in (
            "answer_T", "advantage_T", "old_T", "reference_T", "entropy_T", "is_code_T", "kept_T", "old_entropy_T",
        ):  # fmt: skip
            _check_shape(name, getattr(self, name), self.policy_T.shape)

    def required(self, name: str) -> Tensor:
        """Return the field `name`.

        Raises:
            ValueError: the field is None.
        """
        return required_tensor(self, name, f"this objective reads {name}, which was not given")

    @property
    def mask_T(self) -> Tensor:
        """bool: tokens that count: kept, and not masked by the correction."""
        kept_T = torch.ones_like(self.answer_T, dtype=torch.bool) if self.kept_T is None else self.kept_T
        return kept_T if self.correction is None else kept_T & self.correction.kept_T

    @property
    def log_ratio_T(self) -> Tensor:
        """log of policy over old, with gradient."""
        old_T = self.policy_T if self.old_T is None else self.old_T
        return self.policy_T - old_T.detach()

    def sum_A(self, values_T: Tensor) -> Tensor:
        """Return `[A]` sums over the tokens that count."""
        return sum_by_index(torch.where(self.mask_T, values_T, 0.0), self.answer_T, self.num_answers)

    def lengths_A(self) -> Tensor:
        """Number of tokens of each answer that count, in the dtype of `policy_T`."""
        return self.sum_A(torch.ones_like(self.policy_T, requires_grad=False))


def token_layout(answer_T: Tensor, num_answers: int) -> ItemTokens:
    """Lay out the tokens of every answer in order, answer after answer."""
    zeros_T = torch.zeros(answer_T.shape, device=answer_T.device)
    answers = AnswerLogprobs(zeros_T, answer_T, num_answers)
    return answers.tokens_of(torch.arange(num_answers, device=answer_T.device))


def last_tokens(answer_T: Tensor, num_answers: int) -> Tensor:
    """Return bool `[T]`: the last token of each answer."""
    tokens = token_layout(answer_T, num_answers)
    is_last_E = torch.ones_like(tokens.item_E, dtype=torch.bool)
    is_last_E[:-1] = tokens.item_E[1:] != tokens.item_E[:-1]
    is_last_T = torch.zeros_like(answer_T, dtype=torch.bool)
    is_last_T[tokens.token_E] = is_last_E
    return is_last_T


def _check_shape(name: str, value: Tensor | None, shape: torch.Size) -> None:
    if value is not None and value.shape != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {list(shape)}")
