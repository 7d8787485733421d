"""Log-probabilities of prompts beside those of their answers, for ORPO's cross entropy over both.

Shapes: T answer tokens, U prompt tokens, A answers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs, sum_by_index
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest


class ScoredAnswers(Protocol):
    """A policy's batch."""

    @property
    def answer_T(self) -> Tensor:
        """int64: the answer of each token."""

    @property
    def num_answers(self) -> int:
        """Answers of the batch."""

    def with_prompts(self) -> Any:
        """Return the batch with the text of the prompts scored, too: `[T + U]` tokens, those of the prompt of answer a
        as answer A + a.

        Tokens that stand for sound are none of them, and neither is a prompt's first token, which nothing predicts.
        """


def prompt_lengths(batch: ScoredAnswers) -> Tensor:
    """Return the number `[A]` of tokens of each answer's prompt that are scored."""
    both_A = torch.bincount(batch.with_prompts().answer_T, minlength=2 * batch.num_answers)
    return both_A[batch.num_answers :]


def scored_batch(batch: Any, request: TokenRequest, draw_T: Tensor | None) -> tuple[Any, Tensor | None]:
    """Return the batch whose tokens a request scores, and a random number for each of them."""
    if not request.prompts:
        return batch, draw_T
    both = batch.with_prompts()
    if draw_T is not None:
        draw_T = torch.cat([draw_T, draw_T.new_zeros(len(both.answer_T) - len(draw_T))])
    return both, draw_T


def logprobs_of_figures(
    batch: ScoredAnswers,
    figures: TokenFigures,
    reference_T: Tensor | None,
    draw_T: Tensor | None,
    request: TokenRequest,
) -> AnswerLogprobs:
    """Return the figures of a batch as objectives read them.

    Args:
        batch: what the policy was given.
        figures, reference_T, draw_T: of the tokens of `scored_batch`.
    """
    size, count = len(batch.answer_T), batch.num_answers

    def drop_prompts(values: Tensor | None) -> Tensor | None:
        return values if values is None or not request.prompts else values[:size]

    prompt_sum_A = prompt_length_A = None
    if request.prompts:
        owner_U = batch.with_prompts().answer_T[size:] - count
        prompt_sum_A = sum_by_index(figures.logprob_T[size:], owner_U, count)
        prompt_length_A = torch.bincount(owner_U, minlength=count).to(prompt_sum_A)
    logprob_T = drop_prompts(figures.logprob_T)
    assert logprob_T is not None
    return AnswerLogprobs(
        logprob_T,
        batch.answer_T,
        count,
        drop_prompts(reference_T),
        kl_T=drop_prompts(figures.kl_T),
        contrast_T=drop_prompts(figures.contrast_T),
        log_collision_T=drop_prompts(figures.log_collision_T),
        entropy_T=drop_prompts(figures.entropy_T),
        value_T=drop_prompts(figures.value_T),
        draw_T=drop_prompts(draw_T),
        prompt_sum_A=prompt_sum_A,
        prompt_length_A=prompt_length_A,
    )
