"""Every objective: value against plain Python, gradient by finite differences, independence of packing, no overflow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerLogprobs,
    AnswerScores,
    LabelledSteps,
    Lists,
    Pairs,
    Singles,
    StepScores,
)
from audiollm.rl.objectives.catalog import CATALOG, ObjectiveTerm, objective_term
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import OBJECTIVES, mixed_losses
from tests.audiollm.rl.objectives.closed_forms import CLOSED_FORMS
from tests.audiollm.rl.objectives.objective_cases import (
    CHOSEN,
    LEAVES,
    LENGTHS,
    STEP_ANSWERS,
    Numbers,
    groups_of,
    inputs_of,
    item_losses,
    numbers,
    outer_figures,
    whole_step_figures,
)

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {"beta": 0.4, "label_smoothing": 0.2},
        {"f_divergence": "forward_kl"},
        {"f_divergence": "js_divergence"},
        {"f_divergence": "alpha_divergence", "f_alpha": 0.3},
        {"ld_alpha": 0.3},
        {"ld_alpha": 0.3, "ld_reference": False},
        {"policy_weighting": True},
    ],
    "ipo": [
        {"length": "sum"},
        {"beta": 0.5, "f_divergence": "js_divergence"},
        {"f_divergence": "forward_kl", "length": "sum"},
    ],
    "hinge": [{"f_divergence": "forward_kl"}],
    "exo_pair": [{"f_divergence": "forward_kl", "label_smoothing": 0.1}],
    "robust": [{"f_divergence": "alpha_divergence", "f_alpha": 2.0}],
    "sigmoid_norm": [{"f_divergence": "forward_kl"}],
    "aot": [{"label_smoothing": 0.1}],
    "aot_unpaired": [{"label_smoothing": 0.1, "ld_alpha": 0.5}],
    "discopop": [{"tau": 0.5}, {"tau": 2.0}, {"f_divergence": "forward_kl"}],
    "dpop": [{"penalty": 3.0, "beta": 0.1}],
    "beta_dpo": [{"level": "pair"}, {"level": "pair", "alpha": 50.0}],
    "slic_hf": [{"margin": 4.0, "sft_weight": 0.1, "sft_average": "sequence"}],
    "tdpo2": [{"alpha": 1.0}],
    "cringe": [{"weight": 0.3}, {"gate_temperature": 2.0, "gate_bias": 1.0}],
    "r_dpo": [{"alpha": 0.2, "label_smoothing": 0.1}, {"ld_alpha": 0.5, "f_divergence": "js_divergence"}],
    "ld_dpo": [{"ld_alpha": 0.0}, {"ld_reference": False}],
    "simpo": [
        {"label_smoothing": 0.1, "sft_weight": 0.5},
        {"alpha": 0.3},
        {"sft_weight": 1, "sft_average": "sequence"},
    ],
    "cpo": [
        {"loss": "hinge"},
        {"loss": "ipo"},
        {"loss": "ipo", "alpha": 0.5},
        {"alpha": 0.1, "label_smoothing": 0.2, "sft_weight": 0.0},
    ],
    "orpo": [{"sft_on": "prompt_and_answer"}, {"beta": 1.0, "sft_average": "sequence"}],
    "opa_dpo": [
        {"conditional_weight": 1.0, "rejected_anchor_weight": 0.0, "anchor": 0.2},
        {"anchor_loss": "squared", "altered_anchor_weight": 0.5, "anchor": 0.1},
    ],
    "kto": [{"desirable_weight": 1.3, "undesirable_weight": 0.4, "beta": 0.5}],
    "npo": [{"beta": 1.0, "retain_weight": 0.5, "sft_average": "sequence"}],
    "dro": [{"tau": 0.2}],
    "lipo_lambda": [{"beta": 0.7}],
    "pro": [{"dynamic_temperature": False, "sft_weight": 0.0}],
    "rrhf": [{"sft_average": "token", "sft_weight": 0.3}],
    "d2o": [{"beta": 0.3, "alpha": 0.05}],
    "sppo_soft": [{"beta": 0.2}],
    "sft": [{"average": "sequence"}],
    "bradley_terry": [{"centering": 0.01}],
}
TERMS = [objective_term(name, values) for name in CATALOG for values in [{}, *VARIANTS.get(name, [])]]
EXTREME = 1e4


def label(term: ObjectiveTerm) -> str:
    given = term.settings.model_dump(exclude_defaults=True)
    return "-".join([term.name, *(f"{key}={value}" for key, value in given.items())])


every_term = pytest.mark.parametrize("term", TERMS, ids=label)


def test_the_catalogue_the_functions_and_the_closed_forms_are_the_same_objectives() -> None:
    assert set(CATALOG) == set(OBJECTIVES) == set(CLOSED_FORMS)


@every_term
def test_value_against_the_closed_form(term: ObjectiveTerm) -> None:
    for seed in (0, 1):
        data = numbers(seed)
        expected = torch.tensor(CLOSED_FORMS[term.name](data, term.settings), dtype=torch.float64)
        torch.testing.assert_close(item_losses(term, data), expected, rtol=1e-10, atol=1e-12)


def has_constants_that_move(term: ObjectiveTerm) -> bool:
    """Whether the loss has factors that the gradient leaves out: finite differences see them."""
    s = term.settings
    return (
        getattr(s, "policy_weighting", False)
        or getattr(s, "gate_temperature", None) is not None
        or term.name == "beta_dpo"
        or term.name == "tdpo2"
    )


@pytest.mark.parametrize("term", [term for term in TERMS if not has_constants_that_move(term)], ids=label)
def test_gradient_by_finite_differences(term: ObjectiveTerm) -> None:
    """In every tensor that carries a gradient, summed over items."""
    data = numbers(2)

    def loss(*values: Tensor) -> Tensor:
        return item_losses(term, replace(data, **dict(zip(LEAVES, values, strict=True)))).sum()

    leaves = tuple(getattr(data, name).clone().requires_grad_() for name in LEAVES)
    assert torch.autograd.gradcheck(loss, leaves)
    assert any(each is not None for each in torch.autograd.grad(loss(*leaves), leaves, allow_unused=True))


def one_item(groups: AnswerGroups, index: int) -> AnswerGroups:
    """The group of one item of another."""
    if isinstance(groups, Pairs):
        assert groups.margin_P is not None and groups.altered_P is not None
        at = slice(index, index + 1)
        return Pairs(groups.chosen_P[at], groups.rejected_P[at], groups.margin_P[at], groups.altered_P[at])
    if isinstance(groups, Lists):
        inside = groups.list_L == index
        return Lists(
            groups.answer_L[inside], torch.zeros_like(groups.list_L[inside]), 1, groups.score_L[inside]
        )
    assert isinstance(groups, Singles)
    assert groups.desirable_N is not None and groups.score_N is not None
    at = slice(index, index + 1)
    return Singles(groups.answer_N[at], groups.desirable_N[at], groups.score_N[at])


def figures_of_item(figures: StepFigures, index: int) -> StepFigures:
    if figures.partners is None:
        return figures
    at = slice(index, index + 1)
    partners = figures.partners
    return replace(
        figures,
        partners=replace(partners, of_first_P=partners.of_first_P[at], of_second_P=partners.of_second_P[at]),
    )


@pytest.mark.parametrize("term", [term for term in TERMS if term.needs.reads != "step_scores"], ids=label)
def test_items_one_by_one_give_the_loss_and_gradient_of_all_at_once(term: ObjectiveTerm) -> None:
    """With the figures of the whole step, neither packing nor accumulation changes anything."""
    data = numbers(3)
    leaf = data.score if term.needs.reads == "scores" else data.policy
    leaf.requires_grad_()
    groups, inputs = groups_of(term.needs.groups[0]), inputs_of(term.needs.reads, data)
    together = item_losses(term, data)
    (expected,) = torch.autograd.grad(together.sum(), leaf, retain_graph=True)
    figures = whole_step_figures(term, data)
    torch.testing.assert_close(item_losses(term, data, figures), together, rtol=1e-12, atol=1e-12)
    alone = [
        mixed_losses([term], inputs, one_item(groups, index), figures_of_item(figures, index)).loss_I
        for index in range(len(together))
    ]
    (gradient,) = torch.autograd.grad(torch.cat(alone).sum(), leaf)
    torch.testing.assert_close(torch.cat(alone), together.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@every_term
def test_no_overflow_in_float32(term: ObjectiveTerm, signs: tuple[int, int]) -> None:
    """Every answer's log ratio to the reference is 10,000 up or down: loss and gradient stay finite."""
    data = numbers(4).cast(torch.float32)
    steps = torch.tensor([signs[answer % 2 if answer < 6 else 0] for answer in range(len(LENGTHS))]).float()
    shift = (EXTREME * steps / torch.tensor(LENGTHS))[data.answer]
    for policy, reference in (
        (-shift.clamp(max=0).abs() - 1e-6, -shift.clamp(min=0) - 1e-6),
        (-shift.abs(), -shift.abs() - shift),
    ):
        extreme = replace(
            data,
            policy=policy.requires_grad_(),
            reference=reference,
            score=(EXTREME * steps).requires_grad_(),
            step_score=(EXTREME * torch.tensor([1.0, -1.0] * (len(STEP_ANSWERS) // 2))).requires_grad_(),
        )
        leaf = {"scores": extreme.score, "step_scores": extreme.step_score}.get(
            term.needs.reads, extreme.policy
        )
        losses = item_losses(term, extreme)
        assert losses.dtype == torch.float32
        assert torch.isfinite(losses).all()
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        assert torch.isfinite(gradient).all()


def test_empty_groups_cost_nothing() -> None:
    """A pack may hold answers of no item of a kind."""
    data = numbers()
    answers, none = inputs_of("log_probs", data), torch.zeros(0, dtype=torch.long)
    assert isinstance(answers, AnswerLogprobs)
    pairs, singles = Pairs(none, none), Singles(none, none.bool())
    for name in ("dpo", "ld_dpo", "sampo", "aot"):
        assert len(mixed_losses([objective_term(name, {})], answers, pairs, StepFigures()).loss_I) == 0
    for name in ("npo", "bco"):
        assert len(mixed_losses([objective_term(name, {})], answers, singles, outer_figures()).loss_I) == 0
    assert (
        len(
            mixed_losses(
                [objective_term("bradley_terry", {})], AnswerScores(data.score), pairs, StepFigures()
            ).loss_I
        )
        == 0
    )


@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.groups[0] == "pairs"])
def test_an_answer_without_tokens_gives_finite_losses(name: str) -> None:
    """Bad records are set aside before; a loss must not turn a whole step into NaN."""
    data = numbers()
    kept = data.answer != CHOSEN[1]
    shorter = {
        each: getattr(data, each)[kept] for each in ("policy", "reference", "kl", "contrast", "collision")
    }
    data = replace(data, **shorter, draw=data.draw[kept], answer=data.answer[kept])
    assert torch.isfinite(item_losses(objective_term(name, {}), data)).all()


def test_labelled_steps_of_several_answers() -> None:
    """An answer without steps costs nothing, and the others are means over their own steps."""
    scores = StepScores(torch.zeros(3, dtype=torch.float64), torch.tensor([0, 0, 2]), 3)
    losses = mixed_losses(
        [objective_term("process", {})], scores, LabelledSteps(torch.tensor([1.0, 0.0, 1.0])), StepFigures()
    ).loss_I
    log2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(losses, torch.stack([log2, 0 * log2, log2]))


def test_cases_have_the_numbers_of_the_closed_forms() -> None:
    data: Numbers = numbers()
    assert [len(data.tokens("policy", answer)) for answer in range(len(LENGTHS))] == LENGTHS
