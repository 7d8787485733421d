"""Names, settings and needs of objectives, and weighted mixes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.families.logprobs.answers import (
    AnswerLogprobs,
    AnswerScores,
    LabelledSteps,
    Lists,
    Pairs,
    Singles,
    StepScores,
)
from audiollm.rl.objectives.catalog import CATALOG, objective_entry, objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import OBJECTIVES, mixed_losses
from tests.audiollm.rl.objectives.objective_cases import (
    groups_of,
    inputs_of,
    numbers,
    outer_figures,
    whole_step_figures,
)

ROOT = Path(__file__).parents[4]


def test_a_misspelt_objective_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r"recipe.yaml:9  loss: no such objective: 'lipo-lambda'\n  did you mean 'lipo_lambda'",
    ):
        objective_entry("lipo-lambda", "recipe.yaml:9", "loss")


def test_a_misspelt_setting_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"dpo has no setting 'label_smothing'\n  did you mean 'label_smoothing'"
    ):
        objective_term("dpo", {"label_smothing": 0.1})


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("dpo", {"beta": 0}, "dpo.beta: Input should be greater than 0"),
        ("robust", {"label_smoothing": 0.5}, "robust.label_smoothing: Input should be less than 0.5"),
        ("ld_dpo", {"ld_alpha": 1.5}, "ld_dpo.ld_alpha: Input should be less than or equal to 1"),
        ("dpo", {"f_divergence": "kl"}, "dpo.f_divergence: Input should be 'reverse_kl'"),
        ("aot", {"policy_weighting": True}, "aot.policy_weighting: Input should be False"),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        objective_term(name, values)


def test_the_catalogue_loads_no_torch() -> None:
    code = "import sys, audiollm.rl.objectives.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", CATALOG)
def test_each_objective_works_with_what_it_says_it_needs_and_no_more(name: str) -> None:
    """All optional fields and figures that are not named are left out; without a named one the call fails."""
    term, data = objective_term(name, {}), numbers()
    needs = term.needs
    inputs, groups = inputs_of(needs.reads, data), groups_of(needs.groups[0])
    figures = whole_step_figures(term, data)
    kept = needs.fields | ({"reference_T"} if needs.reference else set())
    if isinstance(inputs, AnswerLogprobs):
        optional = {each.name for each in fields(inputs)} - {"policy_T", "answer_T", "num_answers"}
        inputs = replace(inputs, **dict.fromkeys(optional - kept))
    if isinstance(groups, Pairs):
        groups = replace(groups, margin_P=None, altered_P=groups.altered_P if "altered_P" in kept else None)
    if isinstance(groups, Singles) and name != "sft":
        groups = replace(groups, **dict.fromkeys({"desirable_N", "score_N"} - kept))
    figures = replace(figures, **dict.fromkeys({each.name for each in fields(figures)} - needs.figures))
    mixed_losses([term], inputs, groups, figures)
    for field in kept:
        holder = inputs if hasattr(inputs, field) else groups
        lacking = replace(holder, **{field: None})
        with pytest.raises(ValueError, match=field):
            given = (lacking, groups) if holder is inputs else (inputs, lacking)
            mixed_losses([term], *given, figures)
    for figure in needs.figures & {"kl", "running_mean", "margin_center"}:
        with pytest.raises(ValueError, match=figure):
            mixed_losses([term], inputs, groups, replace(figures, **{figure: None}))


def test_needs_follow_the_settings() -> None:
    assert objective_term("dpo", {"policy_weighting": True}).needs.fields == {"log_collision_T"}
    assert objective_term("orpo", {}).needs.figures == {"tokens_per_answer"}
    assert objective_term("orpo", {"sft_on": "prompt_and_answer"}).needs.fields == {
        "prompt_sum_A",
        "prompt_length_A",
    }
    assert objective_term("cpo", {"sft_weight": 0}).needs.figures == frozenset()
    assert objective_term("beta_dpo", {}).needs.figures == {"margin_center", "margin_mean"}
    assert objective_term("beta_dpo", {"level": "pair"}).needs.figures == {"margin_center"}
    assert objective_term("opa_dpo", {}).needs.altered_recordings
    assert not objective_term("opa_dpo", {"conditional_weight": 0}).needs.altered_recordings
    assert objective_term("kto", {}).needs.mismatched_answers
    assert objective_term("dro", {}).needs.value_head
    assert not objective_term("simpo", {}).needs.reference
    assert objective_term("sft", {}).needs.groups == ("pairs", "lists", "singles")


def test_a_mix_is_the_weighted_sum_and_keeps_the_figures_apart() -> None:
    answers, pairs = inputs_of("log_probs", numbers()), groups_of("pairs")
    terms = [objective_term("dpo", {}, 0.8), objective_term("sft", {}, 0.3), objective_term("ipo", {}, 2.0)]
    mixed = mixed_losses(terms, answers, pairs, StepFigures())
    alone = [OBJECTIVES[term.name](answers, pairs, term.settings, StepFigures()).loss_I for term in terms]
    torch.testing.assert_close(mixed.loss_I, 0.8 * alone[0] + 0.3 * alone[1] + 2.0 * alone[2])
    torch.testing.assert_close(mixed.metrics["ipo/loss"], alone[2])
    torch.testing.assert_close(mixed.metrics["ipo/margin"], mixed.metrics["margin"])


def test_sft_joins_any_kind_of_group() -> None:
    data = numbers()
    answers = inputs_of("log_probs", data)
    assert isinstance(answers, AnswerLogprobs)
    expected = {"pairs": [0, 1, 2, 0], "lists": [0, 1, 0], "singles": [0, None, 2, None, None]}
    lists = groups_of("lists")
    assert isinstance(lists, Lists)
    best = lists.answer_L[lists.entries_at(0)].tolist()
    expected["lists"] = best
    term = objective_term("sft", {"average": "sequence"}, 0.5)
    for kind, answer_of_item in expected.items():
        losses = mixed_losses([term], answers, groups_of(kind), StepFigures()).loss_I
        right = [0.0 if each is None else -0.5 * float(answers.means_A[each]) for each in answer_of_item]
        assert losses.tolist() == pytest.approx(right)
    all_good = mixed_losses([term], answers, Singles(torch.tensor([4, 3])), StepFigures()).loss_I
    assert all_good.tolist() == pytest.approx([-0.5 * float(answers.means_A[each]) for each in (4, 3)])


def test_token_average_of_sft_is_the_mean_over_all_tokens() -> None:
    data = numbers()
    answers, singles = inputs_of("log_probs", data), groups_of("singles")
    assert isinstance(answers, AnswerLogprobs)
    losses = mixed_losses([objective_term("sft", {})], answers, singles, StepFigures()).loss_I
    inside = (data.answer == 0) | (data.answer == 2)
    assert float(losses.sum() / 2) == pytest.approx(-float(data.policy[inside].mean()))


def test_weights_of_items_multiply_their_losses() -> None:
    answers, pairs = inputs_of("log_probs", numbers()), groups_of("pairs")
    assert isinstance(pairs, Pairs)
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    term = objective_term("dpo", {})
    plain = mixed_losses([term], answers, pairs, StepFigures()).loss_I
    weighted = mixed_losses([term], answers, replace(pairs, weight_I=weight), StepFigures()).loss_I
    torch.testing.assert_close(weighted, plain * weight)


def test_figures_of_items_are_detached_and_one_per_item() -> None:
    data = numbers()
    for leaf in (
        data.policy,
        data.score,
        data.step_score,
        data.value,
        data.kl,
        data.contrast,
        data.prompt_sum,
    ):
        leaf.requires_grad_()
    for name in CATALOG:
        term = objective_term(name, {})
        inputs, groups = inputs_of(term.needs.reads, data), groups_of(term.needs.groups[0])
        losses = mixed_losses([term], inputs, groups, outer_figures())
        assert losses.loss_I.requires_grad and losses.metrics
        for figure, value in losses.metrics.items():
            assert value.shape == losses.loss_I.shape, (name, figure)
            assert not value.requires_grad, (name, figure)


def test_figures_of_dpo_are_the_implicit_rewards() -> None:
    data = numbers()
    answers, pairs = inputs_of("log_probs", data), groups_of("pairs")
    assert isinstance(answers, AnswerLogprobs) and isinstance(pairs, Pairs)
    metrics = mixed_losses([objective_term("dpo", {"beta": 0.2})], answers, pairs, StepFigures()).metrics
    chosen, rejected = (0.2 * answers.ratios_A[each] for each in (pairs.chosen_P, pairs.rejected_P))
    torch.testing.assert_close(metrics["reward_chosen"], chosen)
    torch.testing.assert_close(metrics["margin"], chosen - rejected)
    torch.testing.assert_close(metrics["accuracy"], (chosen > rejected).double())
    assert metrics["length_chosen"].tolist() == [5, 2, 3, 5]


def test_figures_of_reward_models() -> None:
    """The share of comparisons in order, pair by pair, list by list, step by step."""
    scores = AnswerScores(torch.tensor([3.0, 1.0, 2.0, -1.0, 4.0]))
    pairs = Pairs(torch.tensor([0, 3]), torch.tensor([1, 4]))
    metrics = mixed_losses([objective_term("bradley_terry", {})], scores, pairs, StepFigures()).metrics
    assert metrics["accuracy"].tolist() == [1, 0]
    assert metrics["margin"].tolist() == [2, -5]
    lists = Lists(
        torch.tensor([0, 1, 2, 3, 4]),
        torch.tensor([0, 0, 0, 1, 1]),
        2,
        torch.tensor([0.9, 0.5, 0.1, 0.2, 0.1]),
    )
    metrics = mixed_losses([objective_term("plackett_luce", {})], scores, lists, StepFigures()).metrics
    assert metrics["accuracy"].tolist() == pytest.approx([2 / 3, 0])
    singles = Singles(torch.tensor([0, 3]), score_N=torch.tensor([2.5, 1.0]))
    metrics = mixed_losses([objective_term("regression", {})], scores, singles, StepFigures()).metrics
    assert metrics["error"].tolist() == [0.5, 2]
    steps = StepScores(torch.tensor([2.0, -2.0, 1.0]), torch.tensor([0, 0, 1]), 2)
    labels = LabelledSteps(torch.tensor([1.0, 0.9, 0.2]))
    metrics = mixed_losses([objective_term("process", {})], steps, labels, StepFigures()).metrics
    assert metrics["accuracy"].tolist() == [0.5, 0]


def test_figures_of_single_answers_keep_the_verdicts_apart() -> None:
    answers, singles = inputs_of("log_probs", numbers()), groups_of("singles")
    assert isinstance(answers, AnswerLogprobs) and isinstance(singles, Singles)
    metrics = mixed_losses([objective_term("kto", {})], answers, singles, outer_figures()).metrics
    assert metrics["reward_desirable"].isnan().tolist() == [False, True, False, True, True]
    assert metrics["reward_undesirable"].isnan().tolist() == [True, False, True, False, False]
    torch.testing.assert_close(metrics["reward"], 0.1 * answers.ratios_A[singles.answer_N])


def test_the_wrong_kind_of_group_is_refused() -> None:
    data = numbers()
    with pytest.raises(ValueError, match="dpo takes pairs, not singles"):
        mixed_losses(
            [objective_term("dpo", {})], inputs_of("log_probs", data), groups_of("singles"), StepFigures()
        )
    with pytest.raises(ValueError, match="bradley_terry reads scores"):
        mixed_losses(
            [objective_term("bradley_terry", {})],
            inputs_of("log_probs", data),
            groups_of("pairs"),
            StepFigures(),
        )
    with pytest.raises(ValueError, match="dpo reads log_probs"):
        mixed_losses([objective_term("dpo", {})], AnswerScores(data.score), groups_of("pairs"), StepFigures())
    with pytest.raises(ValueError, match="at least one term"):
        mixed_losses([], inputs_of("log_probs", data), groups_of("pairs"), StepFigures())
