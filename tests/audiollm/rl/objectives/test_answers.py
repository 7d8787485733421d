"""The flat layout of log-probabilities: packed equals padded, tokens of items, ranks of draws, errors."""

from __future__ import annotations

import pytest
import torch

from audiollm.families.logprobs.answers import AnswerLogprobs, Lists
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.pair_variants import answer_draws
from audiollm.rl.objectives.registry import mixed_losses
from tests.audiollm.rl.objectives.objective_cases import LENGTHS, groups_of, numbers


def flat(values: list[list[float]], **fields: torch.Tensor) -> AnswerLogprobs:
    answer = torch.tensor([index for index, row in enumerate(values) for _ in row])
    tokens = torch.tensor([each for row in values for each in row], dtype=torch.float64)
    return AnswerLogprobs(tokens, answer, len(values), **fields)


def test_sums_lengths_and_means() -> None:
    answers = AnswerLogprobs(
        torch.tensor([-1.0, -2.0, -4.0, -8.0]),
        torch.tensor([0, 2, 0, 2]),
        3,
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
    )
    assert answers.sums_A.tolist() == [-5, 0, -10]
    assert answers.lengths_A.tolist() == [2, 0, 2]
    assert answers.means_A.tolist() == [-2.5, 0, -5]
    assert answers.ratios_A.tolist() == [-3, 0, -8]


def test_tokens_of_items_where_answers_are_interleaved_and_shared() -> None:
    answers = AnswerLogprobs(
        torch.tensor([-1.0, -10.0, -2.0, -20.0, -3.0, -100.0]), torch.tensor([1, 0, 1, 0, 1, 2]), 3
    )
    tokens = answers.tokens_of(torch.tensor([1, 0, 1]))
    assert tokens.token_E.tolist() == [0, 2, 4, 1, 3, 0, 2, 4]
    assert tokens.item_E.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert tokens.position_E.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert tokens.sum(answers.policy_T).tolist() == [-6, -30, -6]
    draws = torch.tensor([0.3, 0.9, 0.1, 0.2, 0.2, 0.5])
    assert tokens.rank_E(draws).tolist() == [2, 0, 1, 1, 0, 2, 0, 1]


def test_equal_draws_are_ranked_by_place() -> None:
    answers = flat([[-1.0] * 4])
    assert answers.tokens_of(torch.tensor([0])).rank_E(torch.zeros(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["dpo", "ld_dpo", "sampo", "simpo", "cringe"])
def test_the_order_of_answers_in_a_pack_changes_nothing(name: str) -> None:
    """Tokens grouped by answer give what interleaved ones give."""
    data, pairs = numbers(1), groups_of("pairs")
    order = torch.argsort(data.answer, stable=True)

    def losses(at: torch.Tensor) -> torch.Tensor:
        answers = AnswerLogprobs(
            data.policy[at],
            data.answer[at],
            len(LENGTHS),
            data.reference[at],
            contrast_T=data.contrast[at],
            draw_T=data.draw[at],
        )
        return mixed_losses([objective_term(name, {})], answers, pairs, StepFigures()).loss_I

    torch.testing.assert_close(losses(order), losses(torch.arange(len(order))), rtol=1e-12, atol=0)


def test_draws_belong_to_answers_and_not_to_packs() -> None:
    together = answer_draws([4, 2, 3], [11, 12, 13])
    assert together.shape == (9,)
    torch.testing.assert_close(together[4:6], answer_draws([2], [12]), rtol=0, atol=0)
    torch.testing.assert_close(together[6:], answer_draws([3], [13]), rtol=0, atol=0)
    assert len(set(together.tolist())) == 9
    assert answer_draws([], []).shape == (0,)


def test_sampo_draws_uniformly() -> None:
    """Over many seeds each of five tokens is kept as often as the others."""
    kept = torch.zeros(5)
    answers = flat([[-1.0] * 5])
    for seed in range(2000):
        rank = answers.tokens_of(torch.tensor([0])).rank_E(answer_draws([5], [seed]))
        kept += (rank < 2).float()
    assert (kept / 2000 - 0.4).abs().max() < 0.04  # 3.6 standard deviations


def test_ranks_of_lists() -> None:
    lists = Lists(
        torch.tensor([5, 6, 7, 8, 9]),
        torch.tensor([1, 0, 1, 0, 1]),
        2,
        torch.tensor([0.5, 1.0, 0.5, 2.0, -1.0]),
    )
    assert lists.lengths_I.tolist() == [2, 3]
    assert lists.entries_at(0).tolist() == [3, 0]  # of list 1 the first of two equal scores
    assert lists.entries_at(1).tolist() == [1, 2]
    assert lists.entries_at(-1).tolist() == [1, 4]
    assert lists.better_LL[0].tolist() == [False, False, False, False, True]
    assert lists.ahead_LL[0].tolist() == [False, False, True, False, True]


def test_errors_name_the_field() -> None:
    tokens, index = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"reference_T has shape \[2\], expected \[3\]"):
        AnswerLogprobs(tokens, index, 1, torch.zeros(2))
    with pytest.raises(ValueError, match=r"value_A has shape \[3\], expected \[1\]"):
        AnswerLogprobs(tokens, index, 1, value_A=torch.zeros(3))
    with pytest.raises(ValueError, match="reads reference_T"):
        _ = AnswerLogprobs(tokens, index, 1).ratios_A
    with pytest.raises(ValueError, match="reads kl_T"):
        mixed_losses([objective_term("tdpo1", {})], flat([[-1.0], [-2.0]]), groups_of("pairs"), StepFigures())
