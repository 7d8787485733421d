"""Limits at which one objective becomes another, and what each gradient leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs, AnswerScores, Lists, Pairs, Singles
from audiollm.rl.objectives.catalog import objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from tests.audiollm.rl.objectives.objective_cases import (
    CHOSEN,
    Numbers,
    groups_of,
    inputs_of,
    item_losses,
    numbers,
    outer_figures,
)
from tests.audiollm.rl.objectives.trl_calls import padded_batch, trl_dpo


def loss_and_gradient(name: str, values: dict[str, Any], data: Numbers) -> tuple[Tensor, Tensor]:
    data = replace(data, policy=data.policy.clone().requires_grad_())
    losses = item_losses(objective_term(name, values), data)
    return losses.detach(), torch.autograd.grad(losses.sum(), data.policy)[0]


LIMITS = [
    ("r_dpo", {"alpha": 0.0}, "dpo", {}),
    (
        "r_dpo",
        {"alpha": 0.0, "beta": 0.3, "label_smoothing": 0.1},
        "dpo",
        {"beta": 0.3, "label_smoothing": 0.1},
    ),
    ("ld_dpo", {"ld_alpha": 1.0}, "dpo", {}),
    ("ld_dpo", {"ld_alpha": 1.0, "ld_reference": False}, "dpo", {}),
    ("ld_dpo", {"ld_alpha": None}, "dpo", {}),
    ("dpop", {"penalty": 0.0, "beta": 0.1}, "dpo", {}),
    ("beta_dpo", {"alpha": 0.0}, "dpo", {}),
    ("beta_dpo", {"alpha": 0.0, "level": "pair", "beta": 0.5}, "dpo", {"beta": 0.5}),
    ("tdpo2", {"alpha": 0.0}, "dpo", {}),
    ("robust", {"label_smoothing": 0.0}, "dpo", {}),
    ("dpo", {"f_divergence": "alpha_divergence", "f_alpha": 1.0}, "dpo", {}),
    ("opa_dpo", {"conditional_weight": 0, "anchor_weight": 0, "rejected_anchor_weight": 0}, "dpo", {}),
    ("simpo", {"gamma": 0.0, "beta": 0.1}, "sigmoid_norm", {}),
    ("cpo", {"sft_weight": 0.0}, "dpo", {}),
    ("orpo", {"beta": 0.0}, "sft", {}),
]


@pytest.mark.parametrize(("name", "values", "limit", "limit_values"), LIMITS)
def test_limits(name: str, values: dict[str, Any], limit: str, limit_values: dict[str, Any]) -> None:
    """Objectives without a reference meet the others at a reference of equal probabilities."""
    data = numbers(5)
    if name in ("simpo", "cpo"):
        data = replace(data, reference=torch.zeros_like(data.reference))
    loss, gradient = loss_and_gradient(name, values, data)
    limit_loss, limit_gradient = loss_and_gradient(limit, limit_values, data)
    torch.testing.assert_close(loss, limit_loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, limit_gradient, rtol=1e-12, atol=1e-14)


def test_alpha_divergence_approaches_reverse_and_forward_kl() -> None:
    data = numbers(5)
    for alpha, limit in ((1.0 + 1e-5, "reverse_kl"), (0.0, "forward_kl")):
        near, _ = loss_and_gradient("dpo", {"f_divergence": "alpha_divergence", "f_alpha": alpha}, data)
        there, _ = loss_and_gradient("dpo", {"f_divergence": limit}, data)
        torch.testing.assert_close(near, there, rtol=1e-4, atol=0)


def test_sampo_on_equal_lengths_is_dpo() -> None:
    data = numbers(6)
    equal = Pairs(torch.tensor([2, 0]), torch.tensor([5, 6]))
    answers = inputs_of("log_probs", data)
    losses = [
        mixed_losses([objective_term(name, {})], answers, equal, StepFigures()).loss_I
        for name in ("sampo", "dpo")
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_sampo_counts_as_many_tokens_of_both_answers() -> None:
    """The gradient reaches min(|w|, |l|) tokens of each answer, those with the smallest draws."""
    data = numbers(6)
    data = replace(data, policy=data.policy.requires_grad_())
    pair = Pairs(torch.tensor([0]), torch.tensor([5]))  # 5 and 3 tokens
    losses = mixed_losses([objective_term("sampo", {})], inputs_of("log_probs", data), pair, StepFigures())
    (gradient,) = torch.autograd.grad(losses.loss_I.sum(), data.policy)
    longer = data.answer == 0
    assert (gradient[longer] != 0).sum() == 3
    assert (gradient[data.answer == 5] != 0).all()
    kept, left = data.draw[longer & (gradient != 0)], data.draw[longer & (gradient == 0)]
    assert kept.max() < left.min()


def test_ld_dpo_at_zero_ignores_the_tail() -> None:
    data = numbers(6)
    _, gradient = loss_and_gradient("ld_dpo", {"ld_alpha": 0.0}, data)
    tail = torch.nonzero(data.answer == 0).flatten()[
        4:
    ]  # in no pair of answer 0 does the other have 5 tokens
    assert (gradient[tail] == 0).all()
    first = torch.nonzero(data.answer == 0).flatten()[:3]
    assert (gradient[first] != 0).all()


def test_token_level_dpo_without_kl_is_dpo() -> None:
    data = numbers(7)
    data = replace(data, kl=torch.zeros_like(data.kl))
    for name in ("tdpo1", "tdpo2"):
        torch.testing.assert_close(loss_and_gradient(name, {}, data), loss_and_gradient("dpo", {}, data))


def test_token_level_dpo_with_equal_kls_is_dpo() -> None:
    """One pair of equal lengths whose tokens drift alike."""
    data = numbers(7)
    data = replace(data, kl=torch.full_like(data.kl, 0.3))
    pair = Pairs(torch.tensor([2]), torch.tensor([5]))
    answers = inputs_of("log_probs", data)
    losses = [
        mixed_losses([objective_term(name, {})], answers, pair, StepFigures()).loss_I
        for name in ("tdpo1", "tdpo2", "dpo")
    ]
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[2])


def test_tdpo2_holds_the_chosen_answers_kl_constant() -> None:
    data = numbers(7)
    data = replace(data, kl=data.kl.requires_grad_())
    pair = Pairs(torch.tensor([2]), torch.tensor([0]))
    answers = inputs_of("log_probs", data)
    gradients = [
        torch.autograd.grad(
            mixed_losses([objective_term(name, values)], answers, pair, StepFigures()).loss_I.sum(),
            data.kl,
            retain_graph=True,
        )[0]
        for name, values in (("tdpo1", {}), ("tdpo2", {"alpha": 1.0}))
    ]
    chosen, rejected = data.answer == 2, data.answer == 0
    assert (gradients[0][chosen] < 0).all()
    assert (gradients[1][chosen] == 0).all()
    torch.testing.assert_close(gradients[1][rejected], gradients[0][rejected])


def test_beta_dpo_takes_its_beta_as_a_constant() -> None:
    """Pair by pair it is DPO at that pair's beta, in value and gradient."""
    data = numbers(8)
    data = replace(data, policy=data.policy.requires_grad_())
    answers, pairs = inputs_of("log_probs", data), groups_of("pairs")
    assert isinstance(pairs, Pairs)
    term = objective_term("beta_dpo", {"level": "pair", "alpha": 5.0})
    losses = mixed_losses([term], answers, pairs, outer_figures())
    betas = losses.metrics["beta"].tolist()
    assert len(set(betas)) == len(CHOSEN)
    for index, beta in enumerate(betas):
        pair = Pairs(pairs.chosen_P[[index]], pairs.rejected_P[[index]])
        fixed = mixed_losses([objective_term("dpo", {"beta": beta})], answers, pair, StepFigures()).loss_I[0]
        torch.testing.assert_close(losses.loss_I[index], fixed)
        ours, theirs = (
            torch.autograd.grad(each, data.policy, retain_graph=True)[0]
            for each in (losses.loss_I[index], fixed)
        )
        torch.testing.assert_close(ours, theirs)


def test_beta_dpo_never_goes_below_its_least_beta() -> None:
    values = {"level": "pair", "alpha": 1e3, "min_beta": 0.02}
    data = numbers(8)
    losses = mixed_losses(
        [objective_term("beta_dpo", values)],
        inputs_of("log_probs", data),
        groups_of("pairs"),
        outer_figures(),
    )
    assert float(losses.metrics["beta"].min()) == 0.02


def test_the_gate_of_cringe_is_a_factor_on_value_and_gradient() -> None:
    data = numbers(9)
    closed, closed_gradient = loss_and_gradient("cringe", {"gate_temperature": 1e12}, data)
    plain, plain_gradient = loss_and_gradient("cringe", {}, data)
    torch.testing.assert_close(closed, plain / 2)  # sigmoid(0)
    torch.testing.assert_close(closed_gradient, plain_gradient / 2)
    shut, shut_gradient = loss_and_gradient("cringe", {"gate_temperature": 1.0, "gate_bias": -1e4}, data)
    assert (shut == 0).all() and (shut_gradient == 0).all()


def test_the_gate_of_cringe_is_a_constant_to_the_gradient() -> None:
    data = numbers(9)
    data = replace(data, policy=data.policy.requires_grad_())
    answers, pair = inputs_of("log_probs", data), Pairs(torch.tensor([2]), torch.tensor([5]))
    losses = [
        mixed_losses([objective_term("cringe", values)], answers, pair, StepFigures()).loss_I[0]
        for values in ({"gate_temperature": 3.0}, {})
    ]
    gate = float((losses[0] / losses[1]).detach())
    assert 0.1 < gate < 0.9
    gated, plain = (torch.autograd.grad(loss, data.policy, retain_graph=True)[0] for loss in losses)
    torch.testing.assert_close(gated, gate * plain)


def test_simpo_does_not_change_with_the_reference() -> None:
    data = numbers(10)
    changed = replace(data, reference=data.reference - 3.0)
    torch.testing.assert_close(
        loss_and_gradient("simpo", {}, data), loss_and_gradient("simpo", {}, changed), rtol=0, atol=0
    )
    answers = inputs_of("log_probs", data)
    assert isinstance(answers, AnswerLogprobs)
    without = mixed_losses(
        [objective_term("simpo", {})], replace(answers, reference_T=None), groups_of("pairs"), StepFigures()
    )
    torch.testing.assert_close(without.loss_I, loss_and_gradient("simpo", {}, data)[0], rtol=0, atol=0)


TWO = Lists(torch.tensor([3, 0, 1, 4]), torch.tensor([0, 0, 1, 1]), 2, torch.tensor([0.0, 1.0, 1.0, 0.0]))
TWO_AS_PAIRS = Pairs(torch.tensor([0, 1]), torch.tensor([3, 4]))


def test_plackett_luce_over_two_answers_is_bradley_terry() -> None:
    scores = AnswerScores(numbers(11).score)
    listed = mixed_losses([objective_term("plackett_luce", {})], scores, TWO, StepFigures()).loss_I
    paired = mixed_losses([objective_term("bradley_terry", {})], scores, TWO_AS_PAIRS, StepFigures()).loss_I
    torch.testing.assert_close(listed, paired, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("on_lists", "on_pairs"),
    [
        (("dpo_plackett_luce", {}), ("dpo", {})),
        (("d2o", {"beta": 0.1, "alpha": 0.1}), ("dpo", {})),
        (("sppo_soft", {"beta": 0.1}), ("sppo_hard", {})),
        (("pro", {"dynamic_temperature": False, "sft_weight": 0}), ("simpo", {"beta": 1.0, "gamma": 0.0})),
        (("sft", {"average": "sequence"}), ("sft", {"average": "sequence"})),
    ],
)
def test_lists_of_two_are_pairs(
    on_lists: tuple[str, dict[str, Any]], on_pairs: tuple[str, dict[str, Any]]
) -> None:
    answers = inputs_of("log_probs", numbers(11))
    listed = mixed_losses([objective_term(*on_lists)], answers, TWO, StepFigures()).loss_I
    paired = mixed_losses([objective_term(*on_pairs)], answers, TWO_AS_PAIRS, StepFigures()).loss_I
    torch.testing.assert_close(listed, paired, rtol=1e-12, atol=0)


def test_sppo_at_probabilities_one_and_zero_is_sppo_hard_of_trl() -> None:
    pytest.importorskip("trl", reason="parity with TRL needs the extra `test`: pip install 'audiollm[test]'")
    batch = padded_batch()
    theirs = trl_dpo(batch, ["sppo_hard"], [1.0])
    lists = Lists(
        torch.arange(8),
        torch.arange(4).repeat(2),
        4,
        torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64),
    )
    term = objective_term("sppo_soft", {"beta": 0.1})
    ours = mixed_losses([term], batch.answers(), lists, StepFigures()).loss_I.mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(each, batch.policy, retain_graph=True)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)


def test_kto_without_kl_is_apo_zero_unpaired() -> None:
    answers, singles = inputs_of("log_probs", numbers(12)), groups_of("singles")
    kto = mixed_losses([objective_term("kto", {})], answers, singles, StepFigures(kl=torch.tensor(0.0)))
    apo = mixed_losses([objective_term("apo_zero_unpaired", {})], answers, singles, StepFigures())
    torch.testing.assert_close(kto.loss_I, apo.loss_I)


def test_bco_of_both_answers_without_a_shift_is_bco_pair() -> None:
    answers = inputs_of("log_probs", numbers(12))
    singles = Singles(torch.tensor([0, 3]), torch.tensor([True, False]))
    single = mixed_losses(
        [objective_term("bco", {})], answers, singles, StepFigures(running_mean=torch.tensor(0.0))
    )
    pair = Pairs(torch.tensor([0]), torch.tensor([3]))
    paired = mixed_losses([objective_term("bco_pair", {})], answers, pair, StepFigures())
    torch.testing.assert_close(single.loss_I.sum(), paired.loss_I.sum())


def test_npo_goes_over_to_gradient_ascent() -> None:
    """With beta to 0 its gradient is that of the log-probability itself."""
    data = numbers(12)
    data = replace(data, policy=data.policy.requires_grad_())
    singles = Singles(torch.tensor([0, 3]), torch.tensor([False, False]))
    answers = inputs_of("log_probs", data)
    losses = mixed_losses([objective_term("npo", {"beta": 1e-9})], answers, singles, StepFigures()).loss_I
    (gradient,) = torch.autograd.grad(losses.sum(), data.policy)
    is_forgotten = (data.answer == 0) | (data.answer == 3)
    torch.testing.assert_close(gradient, is_forgotten.double(), rtol=1e-6, atol=1e-12)


def test_dro_is_zero_where_the_policy_is_optimal() -> None:
    """r = V + tau log(policy / reference)."""
    data = numbers(13)
    answers = inputs_of("log_probs", data)
    assert isinstance(answers, AnswerLogprobs)
    chosen = torch.tensor([0, 1])
    scores = answers.required("value_A")[chosen] + 0.5 * answers.ratios_A[chosen]
    losses = mixed_losses(
        [objective_term("dro", {"tau": 0.5})], answers, Singles(chosen, score_N=scores), StepFigures()
    )
    torch.testing.assert_close(losses.loss_I, torch.zeros(2, dtype=torch.float64))


def test_lists_that_are_in_order_cost_rrhf_only_its_cross_entropy() -> None:
    data = numbers(14)
    answers = inputs_of("log_probs", data)
    assert isinstance(answers, AnswerLogprobs)
    entries = torch.tensor([0, 1, 2])
    lists = Lists(entries, torch.zeros(3, dtype=torch.long), 1, answers.means_A[entries])
    losses = mixed_losses([objective_term("rrhf", {"sft_weight": 0.0})], answers, lists, StepFigures())
    assert float(losses.loss_I) == 0
    assert float(losses.metrics["accuracy"]) == 1
    turned = replace(lists, score_L=-lists.score_L)
    losses = mixed_losses([objective_term("rrhf", {"sft_weight": 0.0})], answers, turned, StepFigures())
    assert float(losses.loss_I) > 0
    assert float(losses.metrics["accuracy"]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_odds_of_a_certain_answer_are_finite(dtype: torch.dtype) -> None:
    """A probability of 1, and one that rounds to it, give finite losses and gradients."""
    for certain in (0.0, -1e-30, -1e-9):
        policy = torch.tensor([certain, -2.0], dtype=dtype, requires_grad=True)
        for chosen, rejected in ((0, 1), (1, 0)):
            answers = AnswerLogprobs(policy, torch.tensor([0, 1]), 2)
            pair = Pairs(torch.tensor([chosen]), torch.tensor([rejected]))
            losses = mixed_losses([objective_term("orpo", {})], answers, pair, StepFigures()).loss_I
            (gradient,) = torch.autograd.grad(losses.sum(), policy)
            assert torch.isfinite(losses).all() and torch.isfinite(gradient).all()


def test_d2o_without_samples_pushes_the_negative_down() -> None:
    answers = inputs_of("log_probs", numbers(14))
    assert isinstance(answers, AnswerLogprobs)
    alone = Lists(torch.tensor([3]), torch.tensor([0]), 1, torch.tensor([0.0]))
    losses = mixed_losses([objective_term("d2o", {"alpha": 0.2})], answers, alone, StepFigures()).loss_I
    torch.testing.assert_close(losses, -torch.nn.functional.logsigmoid(-0.2 * answers.ratios_A[[3]]))


def test_equal_scores_are_compared_with_nothing() -> None:
    data = numbers(14)
    answers = inputs_of("log_probs", data)
    lists = Lists(torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.long), 1, torch.zeros(3))
    for name, values in (("lipo_lambda", {}), ("rrhf", {"sft_weight": 0.0}), ("pro", {"sft_weight": 0.0})):
        losses = mixed_losses([objective_term(name, values)], answers, lists, StepFigures())
        assert float(losses.loss_I) == 0
        assert losses.metrics["accuracy"].isnan().all()
