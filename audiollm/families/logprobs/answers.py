"""Inputs and outputs of the objectives: log-probabilities per token, groups of answers, losses per item.

Shapes: T target tokens of all answers, A answers, I items of a group (P pairs, G lists, N single answers),
L entries of lists, S steps of reasoning, E tokens of items, answer after answer (an answer in two items counts twice).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


def required_tensor(holder: object, name: str, problem: str) -> Tensor:
    """Return the field `name`.

    Raises:
        ValueError: the field is None; the error says `problem`.
    """
    value = getattr(holder, name)
    if value is None:
        raise ValueError(problem)
    assert isinstance(value, Tensor)
    return value


def sum_by_index(values_E: Tensor, index_E: Tensor, size: int) -> Tensor:
    """Return `[size]` sums of the values that share an index; differentiable."""
    return values_E.new_zeros(size).index_add(0, index_E, values_E)


@dataclass(frozen=True)
class ItemTokens:
    """The tokens of one answer per item, laid out item after item."""

    token_E: Tensor
    """int64: places of the tokens in `T`."""
    item_E: Tensor
    """int64: the item of each token."""
    position_E: Tensor
    """int64: place of each token within its answer, from 0."""
    num_items: int

    def sum(self, values_T: Tensor, weight_E: Tensor | None = None) -> Tensor:
        """Return `[num_items]` sums of `values_T` over the items' tokens, each times its weight."""
        values_E = values_T[self.token_E]
        weighted_E = values_E if weight_E is None else values_E * weight_E
        return sum_by_index(weighted_E, self.item_E, self.num_items)

    def rank_E(self, draw_T: Tensor) -> Tensor:
        """Return each token's rank, from 0, among the draws of its answer; ties go by place."""
        by_draw = torch.argsort(draw_T[self.token_E], stable=True)
        order = by_draw[torch.argsort(self.item_E[by_draw], stable=True)]
        ranks = torch.empty_like(self.position_E)
        ranks[order] = self.position_E  # positions count from 0 within each item, in the same layout
        return ranks


@dataclass(frozen=True)
class AnswerLogprobs:
    """Log-probabilities of the tokens of all answers in a call, flat: packed and padded policies both make them.

    Tokens of an answer stand in their order; answers may be interleaved. Natural logarithms throughout. The fields
    after `reference_T` are read by the objectives that ask for them (`catalog.ObjectiveEntry`). Sums per answer are
    computed once and kept, with their graph: losses of one object share one backward pass.

    Raises:
        ValueError: fields whose shapes do not fit together.
    """

    policy_T: Tensor
    """Log-probability of each token under the trained policy, with gradient."""
    answer_T: Tensor
    """int64: the answer that each token belongs to."""
    num_answers: int
    reference_T: Tensor | None = None
    """The same under the reference, without gradient."""
    kl_T: Tensor | None = None
    """KL(reference || policy) of the distributions at each token, with gradient (token-level DPO)."""
    contrast_T: Tensor | None = None
    """Log-probability, with gradient, of a token that was drawn at this place among the policy's k likeliest other
    than the answer's own (CRINGE); read on rejected answers."""
    log_collision_T: Tensor | None = None
    """log of the summed squared probabilities of the policy's distribution at each token (WPO)."""
    entropy_T: Tensor | None = None
    """Entropy of the policy's distribution at each token, in nats, with gradient (policy gradients)."""
    value_T: Tensor | None = None
    """The critic's value before each token is chosen, with gradient (GAE; `value_A` is that of the first)."""
    codebook_T: Tensor | None = None
    """int64: the codebook that a code of speech is from, counted from 0; -1 of a word (a KL of its own for speech, the
    codes that have advantages)."""
    draw_T: Tensor | None = None
    """A random number per token, independent of packing (`length.answer_draws`; SamPO)."""
    value_A: Tensor | None = None
    """The value head's estimate for each answer's prompt, with gradient (DRO)."""
    prompt_sum_A: Tensor | None = None
    """Summed log-probability of each answer's prompt under the policy, with gradient (ORPO over prompts)."""
    prompt_length_A: Tensor | None = None
    """Number of tokens in `prompt_sum_A`."""

    def __post_init__(self) -> None:
        for name in (
            "answer_T",
            "reference_T",
            "kl_T",
            "contrast_T",
            "log_collision_T",
            "entropy_T",
            "value_T",
            "codebook_T",
            "draw_T",
        ):
            self._check(name, self.policy_T.shape)
        for name in ("value_A", "prompt_sum_A", "prompt_length_A"):
            self._check(name, torch.Size([self.num_answers]))

    def _check(self, name: str, shape: torch.Size) -> None:
        value = getattr(self, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, expected {list(shape)}")

    def required(self, name: str) -> Tensor:
        """Return the field `name`.

        Raises:
            ValueError: the field is None.
        """
        return required_tensor(self, name, f"this objective reads {name}, which was not computed")

    @property
    def is_code_T(self) -> Tensor | None:
        """bool: the token is a code of speech, and no word."""
        return None if self.codebook_T is None else self.codebook_T >= 0

    @cached_property
    def sums_A(self) -> Tensor:
        """Log-probability of each answer under the policy."""
        return sum_by_index(self.policy_T, self.answer_T, self.num_answers)

    @cached_property
    def lengths_A(self) -> Tensor:
        """Number of tokens of each answer, in the dtype of `policy_T`."""
        ones_T = torch.ones_like(self.policy_T, requires_grad=False)
        return sum_by_index(ones_T, self.answer_T, self.num_answers)

    @cached_property
    def means_A(self) -> Tensor:
        """Mean log-probability per token of each answer under the policy; 0 for an answer without tokens."""
        return self.sums_A / self.lengths_A.clamp(min=1)

    @cached_property
    def ratios_A(self) -> Tensor:
        """Log of policy over reference of each answer."""
        return sum_by_index(self.ratio_T, self.answer_T, self.num_answers)

    @cached_property
    def ratio_T(self) -> Tensor:
        """Log of policy over reference of each token."""
        return self.policy_T - self.required("reference_T")

    def first_of(self, values_T: Tensor) -> Tensor:
        """Return the value `[num_answers]` at the first token of each answer; 0 for an answer without tokens."""
        tokens = self.tokens_of(torch.arange(self.num_answers, device=self.answer_T.device))
        is_first_E = tokens.position_E == 0
        first = tokens.token_E[is_first_E]
        return sum_by_index(values_T[first], tokens.item_E[is_first_E], self.num_answers)

    def tokens_of(self, answer_I: Tensor) -> ItemTokens:
        """Lay out the tokens of one answer per item."""
        lengths_A = torch.bincount(self.answer_T, minlength=self.num_answers)
        order_T = torch.argsort(self.answer_T, stable=True)
        starts_A = lengths_A.cumsum(0) - lengths_A
        lengths_I = lengths_A[answer_I]
        item_E = torch.repeat_interleave(torch.arange(len(answer_I), device=answer_I.device), lengths_I)
        first_I = lengths_I.cumsum(0) - lengths_I
        position_E = torch.arange(len(item_E), device=answer_I.device) - first_I[item_E]
        token_E = order_T[starts_A[answer_I][item_E] + position_E]
        return ItemTokens(token_E, item_E, position_E, len(answer_I))


@dataclass(frozen=True)
class AnswerScores:
    """Scores that a reward model gives to whole answers."""

    score_A: Tensor
    """One score per answer, with gradient."""


@dataclass(frozen=True)
class StepScores:
    """Scores that a process reward model gives to the steps of answers."""

    score_S: Tensor
    """One score (a logit) per step, with gradient."""
    answer_S: Tensor
    """int64: the answer that each step belongs to."""
    num_answers: int


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers. An answer may be in several pairs."""

    chosen_P: Tensor
    """int64: index of the preferred answer."""
    rejected_P: Tensor
    """int64: index of the other."""
    margin_P: Tensor | None = None
    """How much better the chosen answer was judged (Bradley-Terry with margin)."""
    altered_P: Tensor | None = None
    """int64: index of the chosen answer once more, computed with a masked or another recording (OPA-DPO)."""
    weight_I: Tensor | None = None
    """Factor on each pair's loss."""


@dataclass(frozen=True)
class Lists:
    """Lists of answers to one prompt each, with a score per answer; higher is better."""

    answer_L: Tensor
    """int64: index of each entry's answer."""
    list_L: Tensor
    """int64: the list of each entry."""
    num_lists: int
    score_L: Tensor
    """Score of each entry; ranks can be given as negative numbers."""
    weight_I: Tensor | None = None
    """Factor on each list's loss."""

    @cached_property
    def same_LL(self) -> Tensor:
        """Whether two entries are of one list."""
        return self.list_L[:, None] == self.list_L[None]

    @cached_property
    def better_LL(self) -> Tensor:
        """Whether the entry of the row has a higher score than the entry of the column, in the same list."""
        return self.same_LL & (self.score_L[:, None] > self.score_L[None])

    @cached_property
    def ahead_LL(self) -> Tensor:
        """Whether the entry of the row is ranked before that of the column; equal scores go by place."""
        return self.ranked_LL(self.score_L)

    def ranked_LL(self, score_L: Tensor) -> Tensor:
        """As `ahead_LL`, for other scores."""
        place_L = torch.arange(len(score_L), device=score_L.device)
        equal_LL = (score_L[:, None] == score_L[None]) & (place_L[:, None] < place_L[None])
        return self.same_LL & ((score_L[:, None] > score_L[None]) | equal_LL)

    @cached_property
    def lengths_I(self) -> Tensor:
        """Entries of each list, int64."""
        return torch.bincount(self.list_L, minlength=self.num_lists)

    def entries_at(self, rank: int) -> Tensor:
        """Return the entry of each list at `rank`: 0 is the best, -1 the worst."""
        ahead_LL = self.ahead_LL if rank >= 0 else self.ahead_LL.T
        place_L = ahead_LL.sum(0)
        entries = torch.nonzero(place_L == (rank if rank >= 0 else -rank - 1)).flatten()
        return entries[torch.argsort(self.list_L[entries])]


@dataclass(frozen=True)
class Singles:
    """Single answers with a verdict or a score."""

    answer_N: Tensor
    """int64: index of each item's answer."""
    desirable_N: Tensor | None = None
    """bool: the verdict; None where the objective reads scores alone, or all are desirable (SFT)."""
    score_N: Tensor | None = None
    """A reward (DRO), a win rate, or a target (regression)."""
    weight_I: Tensor | None = None
    """Factor on each answer's loss."""

    def required(self, name: str) -> Tensor:
        """Return the field `name`.

        Raises:
            ValueError: the field is None.
        """
        return required_tensor(self, name, f"this objective reads {name}, which the data lack")


@dataclass(frozen=True)
class LabelledSteps:
    """Labels for the steps of `StepScores`; an item is an answer."""

    label_S: Tensor
    """Share of right continuations from each step, from 0 to 1."""
    weight_I: Tensor | None = None
    """Factor on each answer's loss."""


AnswerGroups = Pairs | Lists | Singles | LabelledSteps
ObjectiveInputs = AnswerLogprobs | AnswerScores | StepScores


@dataclass(frozen=True)
class ItemLosses:
    """Losses before averaging: the training adds them over packs and ranks and divides by the step's items."""

    loss_I: Tensor
    """Loss of each item, with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Figures per item, detached; NaN where a figure does not apply to an item."""

    def weighted(self, weight_I: Tensor | float | None) -> ItemLosses:
        """Return the same items with each loss multiplied by its weight."""
        return self if weight_I is None else ItemLosses(self.loss_I * weight_I, self.metrics)
