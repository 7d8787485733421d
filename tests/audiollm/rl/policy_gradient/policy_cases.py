"""A small step of rollouts whose tokens are interleaved, as tensors and as plain lists, whole and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from audiollm.rl.policy_gradient.catalog import PolicyTerm
from audiollm.rl.policy_gradient.corrections import importance_weights
from audiollm.rl.policy_gradient.losses import (
    PolicyLoss,
    Regularizers,
    StepCounts,
    entropy_threshold,
    policy_loss,
)
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import CorrectionSettings
from tests.audiollm.rl.policy_gradient.policy_closed_forms import PlainAnswer

LENGTHS = [5, 2, 3, 4, 1, 3]
MAX_TOKENS = 7
TRAINED = [True, True, True, True, False, True]
"""Answer 4 has no reward."""


@dataclass
class Rollouts:
    """Leaves of a step, float64."""

    policy: Tensor
    old: Tensor
    reference: Tensor
    behaviour: Tensor
    entropy: Tensor
    advantage: Tensor
    answer: Tensor
    kept: Tensor

    def part(self, answers: Sequence[int]) -> Rollouts:
        """The tokens of some answers, renumbered in the given order."""
        number = torch.full((len(LENGTHS),), -1)
        number[list(answers)] = torch.arange(len(answers))
        inside = number[self.answer] >= 0
        tensors = {name: value[inside] for name, value in vars(self).items()}
        return Rollouts(**{**tensors, "answer": number[self.answer][inside]})

    def tokens(
        self, correction: CorrectionSettings | None = None, answers: int = len(LENGTHS)
    ) -> RolloutLogprobs:
        flat = RolloutLogprobs(
            self.policy,
            self.answer,
            answers,
            self.advantage,
            self.old,
            self.reference,
            self.entropy,
            self.kept,
        )
        if correction is None:
            return flat
        weights = importance_weights(self.behaviour, self.old, self.answer, answers, correction, self.kept)
        return replace(flat, correction=weights)

    def plain(self, tokens: RolloutLogprobs, by_sequence: bool = False) -> list[PlainAnswer]:
        """The answers as lists; weights and masks from the correction, which has tests of its own."""
        weight_T = torch.ones_like(self.policy)
        if tokens.correction is not None:
            weight_T = tokens.correction.weight_T
        found = []
        for number in range(tokens.num_answers):
            own = self.answer == number
            rows = [self.policy, self.old, self.reference, self.entropy, self.advantage, weight_T]
            lists = [row.detach()[own].tolist() for row in rows]
            found.append(PlainAnswer(*lists, tokens.mask_T[own].tolist(), by_sequence))
        return found


def rollouts(seed: int = 0, spread: float = 0.4) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    answer = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    answer = answer[torch.randperm(total, generator=generator)]

    def noise() -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    policy = -noise().abs() - 0.2
    old = policy + spread * noise()
    return Rollouts(
        policy=policy,
        old=old,
        reference=policy + spread * noise(),
        behaviour=old + spread * noise(),
        entropy=noise().abs(),
        advantage=noise(),
        answer=answer,
        kept=torch.tensor(TRAINED)[answer],
    )


def counts_of(tokens: RolloutLogprobs, threshold: Tensor | None = None) -> StepCounts:
    return StepCounts.of(
        tokens.mask_T, tokens.answer_T, tokens.num_answers, MAX_TOKENS, tokens.entropy_T, threshold
    )


def whole_loss(
    term: PolicyTerm, tokens: RolloutLogprobs, added: Regularizers | None = None, share: float = 1.0
) -> PolicyLoss:
    """The loss of a step that is one call."""
    threshold = None
    if share < 1:
        threshold = entropy_threshold(tokens.required("entropy_T")[tokens.mask_T], share)
    return policy_loss(term, tokens, counts_of(tokens, threshold), added)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("clip", {"epsilon_low": 0.1, "epsilon_high": 0.3, "dual_clip": 1.2}),
    ("clip", {"max_ratio": 1.25, "level": "sequence", "average": "answer_sum"}),
    ("clip", {"level": "product", "average": "fixed", "dual_clip": 3.0}),
    ("grpo", {}),
    ("bnpo", {}),
    ("dapo", {}),
    ("dr_grpo", {}),
    ("gspo", {}),
    ("gspo", {"epsilon_low": 0.3, "epsilon_high": 0.3}),
    ("gspo_token", {}),
    ("gspo_token", {"epsilon_low": 0.3, "epsilon_high": 0.3}),
    ("luspo", {}),
    ("rloo", {}),
    ("cispo", {}),
    ("cispo", {"max_ratio": 1.1}),
    ("sapo", {}),
    ("sapo", {"temperature_positive": 0.5, "temperature_negative": 3.0, "average": "token"}),
    ("vespo", {}),
    ("vespo", {"k_positive": 1.0, "lambda_negative": 4.0, "average": "answer"}),
]
