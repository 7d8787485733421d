"""Every loss of TRL 1.16 in value and gradient, against TRL itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs, AnswerScores, Pairs, Singles
from audiollm.rl.objectives.catalog import TRL_LOSS_TYPES, ObjectiveTerm, objective_term
from audiollm.rl.objectives.figures import StepFigures, mismatched_kl
from audiollm.rl.objectives.registry import mixed_losses
from tests.audiollm.rl.objectives.trl_calls import (
    PAIRS,
    ROW,
    SPANS,
    PaddedBatch,
    padded_batch,
    trl_dpo,
    trl_kto,
    trl_reward,
    trl_without_reference,
)

pytest.importorskip("trl", reason="parity with TRL needs the extra `test`: pip install 'audiollm[test]'")

TOLERANCE = 1e-6
ORPO_TOLERANCE = 1e-5
"""TRL computes ORPO's odds in float32."""
ALL_PAIRS = Pairs(torch.arange(PAIRS), torch.arange(PAIRS, 2 * PAIRS))


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value of TRL's."""
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def deviations(ours: Tensor, theirs: Tensor, leaf: Tensor) -> float:
    """The larger of the deviations of a loss and of its gradient."""
    (our_gradient,) = torch.autograd.grad(ours, leaf)
    (their_gradient,) = torch.autograd.grad(theirs, leaf)
    assert their_gradient.abs().max() > 0
    return max(deviation(ours, theirs), deviation(our_gradient, their_gradient))


def our_pairs(batch: PaddedBatch, *terms: ObjectiveTerm) -> Tensor:
    return mixed_losses(terms, batch.answers(), ALL_PAIRS, StepFigures()).loss_I.mean()


LABEL_SMOOTHING = {"exo_pair": 1e-3, "robust": 0.1, "aot": 0.1, "aot_unpaired": 0.1}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_all_fifteen_loss_types_of_dpo(loss_type: str, seed: int) -> None:
    assert len(TRL_LOSS_TYPES) == 15
    batch = padded_batch(seed=seed)
    smoothing = LABEL_SMOOTHING.get(loss_type, 0.0)
    theirs = trl_dpo(batch, [loss_type], [1.0], label_smoothing=smoothing)
    ours = our_pairs(
        batch, objective_term(TRL_LOSS_TYPES[loss_type], {"label_smoothing": smoothing} if smoothing else {})
    )
    assert deviations(ours, theirs, batch.policy) < TOLERANCE


def test_the_names_are_all_that_trl_knows() -> None:
    batch = padded_batch()
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        trl_dpo(batch, ["none"], [1.0])
    assert all(f"'{name}'" in str(error.value) for name in TRL_LOSS_TYPES)
    assert str(error.value).count("'") == 2 * len(TRL_LOSS_TYPES)


@pytest.mark.parametrize(
    ("loss_types", "weights"),
    [
        (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]),
        (["hinge", "ipo"], [0.5, 2.0]),
        (["aot", "sppo_hard", "apo_zero", "sigmoid_norm"], [1.0, 0.01, 0.3, 0.7]),
    ],
)
def test_weighted_mixes_of_loss_types(loss_types: Sequence[str], weights: Sequence[float]) -> None:
    batch = padded_batch()
    terms = [
        objective_term(TRL_LOSS_TYPES[name], {}, weight)
        for name, weight in zip(loss_types, weights, strict=True)
    ]
    theirs = trl_dpo(batch, loss_types, weights)
    assert deviations(our_pairs(batch, *terms), theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize(
    "loss_type", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"]
)
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence"])
def test_f_divergences(loss_type: str, divergence: str) -> None:
    batch, smoothing = padded_batch(), LABEL_SMOOTHING.get(loss_type, 0.0)
    theirs = trl_dpo(batch, [loss_type], [1.0], f_divergence_type=divergence, label_smoothing=smoothing)
    values = {"f_divergence": divergence} | ({"label_smoothing": smoothing} if smoothing else {})
    ours = our_pairs(batch, objective_term(TRL_LOSS_TYPES[loss_type], values))
    assert deviations(ours, theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("coefficient", [0.5, 0.0, 2.0, 1.0])
def test_the_alpha_divergence_which_trl_has_in_float32(coefficient: float) -> None:
    batch = padded_batch(torch.float32)
    options = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": coefficient}
    theirs = trl_dpo(batch, ["sigmoid"], [1.0], **options)
    term = objective_term("dpo", {"f_divergence": "alpha_divergence", "f_alpha": coefficient})
    assert deviations(our_pairs(batch, term), theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "aot_unpaired", "nca_pair", "sppo_hard"])
def test_ld_dpo(alpha: float, loss_type: str) -> None:
    batch = padded_batch()
    theirs = trl_dpo(batch, [loss_type], [1.0], ld_alpha=alpha)
    name = "ld_dpo" if loss_type == "sigmoid" else TRL_LOSS_TYPES[loss_type]
    ours = our_pairs(batch, objective_term(name, {"ld_alpha": alpha}))
    assert deviations(ours, theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("loss_type", ["sigmoid", "discopop", "apo_down", "bco_pair"])  # TRL fails on "hinge"
def test_weighting_by_the_policy(loss_type: str) -> None:
    batch = padded_batch()
    theirs = trl_dpo(batch, [loss_type], [1.0], use_weighting=True)
    ours = our_pairs(batch, objective_term(TRL_LOSS_TYPES[loss_type], {"policy_weighting": True}))
    assert deviations(ours, theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("beta", [0.01, 0.5])
def test_other_betas(beta: float) -> None:
    batch = padded_batch()
    theirs = trl_dpo(batch, ["sigmoid", "ipo", "discopop"], [1.0] * 3, beta=beta, discopop_tau=0.2)
    terms = [
        objective_term("dpo", {"beta": beta}),
        objective_term("ipo", {"beta": beta}),
        objective_term("discopop", {"beta": beta, "tau": 0.2}),
    ]
    assert deviations(our_pairs(batch, *terms), theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kto", {}),
        ("kto", {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.33}),
        ("apo_zero_unpaired", {}),
        ("apo_zero_unpaired", {"desirable_weight": 0.7}),
    ],
)
@pytest.mark.parametrize("drift", [1.0, -1.0])
def test_kto(name: str, options: dict[str, Any], drift: float) -> None:
    """A KL below 0 counts as 0."""
    batch = padded_batch()
    desirable = torch.tensor([1, 1, 1, 0, 0, 1, 0, 0]).bool()
    reference = torch.linspace(-4, -1, 8, dtype=torch.float64)
    policy = reference + drift * torch.linspace(0, 1, 8, dtype=torch.float64)
    theirs = trl_kto(batch, desirable, (policy, reference), loss_type=name, **options)
    figures = StepFigures(kl=mismatched_kl(policy, reference)) if name == "kto" else StepFigures()
    singles = Singles(torch.arange(8), desirable)
    losses = mixed_losses([objective_term(name, options)], batch.answers(), singles, figures)
    assert deviations(losses.loss_I.mean(), theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("centering", [None, 0.01])
def test_reward_models(with_margin: bool, centering: float | None) -> None:
    scores = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    margin = torch.tensor([0.1, 1.0, 0.0, 0.5], dtype=torch.float64) if with_margin else None
    theirs = trl_reward(scores, margin, centering)
    pairs = Pairs(ALL_PAIRS.chosen_P, ALL_PAIRS.rejected_P, margin_P=margin)
    term = objective_term("bradley_terry", {"centering": centering or 0.0})
    ours = mixed_losses([term], AnswerScores(scores), pairs, StepFigures()).loss_I.mean()
    assert deviations(ours, theirs, scores) < TOLERANCE


VOCABULARY = 7


def logits_and_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2 * PAIRS, ROW, VOCABULARY, dtype=torch.float64, generator=generator)
    ids = torch.randint(VOCABULARY, (2 * PAIRS, ROW), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (first, end) in enumerate(SPANS):
        mask[row, first:end] = 1
    return logits.requires_grad_(), ids, mask


def answers_of_logits(logits: Tensor, ids: Tensor, mask: Tensor) -> AnswerLogprobs:
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    rows = torch.arange(len(ids))[:, None].expand_as(logprobs)
    inside = mask[:, 1:].bool()
    outside = (logprobs * ~inside).sum(1)
    return AnswerLogprobs(
        logprobs[inside],
        rows[inside],
        len(ids),
        prompt_sum_A=outside,
        prompt_length_A=(~inside).sum(1).to(logprobs),
    )


UNREFERENCED = [
    ("cpo", {}, {}),
    ("cpo", {"label_smoothing": 0.1, "sft_weight": 0.0}, {"label_smoothing": 0.1, "cpo_alpha": 0.0}),
    ("cpo", {"loss": "hinge", "beta": 0.4}, {"loss_type": "hinge", "beta": 0.4}),
    ("cpo", {"loss": "ipo", "beta": 0.4}, {"loss_type": "ipo", "beta": 0.4}),
    ("cpo", {"alpha": 0.02}, {"alpha": 0.02}),
    ("simpo", {}, {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0}),
    (
        "simpo",
        {"beta": 0.1, "gamma": 0.3, "sft_weight": 1.0, "label_smoothing": 0.2},
        {"loss_type": "simpo", "simpo_gamma": 0.3, "label_smoothing": 0.2},
    ),
    ("simpo", {"alpha": 0.25}, {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "alpha": 0.25}),
]


@pytest.mark.parametrize(("name", "ours", "theirs"), UNREFERENCED)
def test_cpo_and_simpo_with_their_cross_entropy(
    name: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    from trl.experimental.cpo import CPOTrainer

    logits, ids, mask = logits_and_rows()
    expected = trl_without_reference(CPOTrainer, logits, ids, mask, **theirs)
    answers = answers_of_logits(logits, ids, mask)
    losses = mixed_losses([objective_term(name, ours)], answers, ALL_PAIRS, StepFigures())
    assert deviations(losses.loss_I.mean(), expected, logits) < TOLERANCE


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo_with_cross_entropy_over_prompt_and_answer(beta: float) -> None:
    from trl.experimental.orpo import ORPOTrainer

    logits, ids, mask = logits_and_rows()
    expected = trl_without_reference(ORPOTrainer, logits, ids, mask, beta=beta)
    answers = answers_of_logits(logits, ids, mask)
    term = objective_term("orpo", {"beta": beta, "sft_on": "prompt_and_answer"})
    ours = mixed_losses([term], answers, ALL_PAIRS, StepFigures()).loss_I.mean()
    assert deviations(ours, expected, logits) < ORPO_TOLERANCE
