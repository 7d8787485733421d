"""KL estimates on a categorical distribution whose KL is known, by sums over all outcomes; controllers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.rl.policy_gradient.catalog import KL_CONTROLLERS, policy_term
from audiollm.rl.policy_gradient.kl import CONTROLLERS, kl_controller, kl_estimates, kl_loss
from audiollm.rl.policy_gradient.losses import Regularizers, StepCounts, policy_loss
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs
from audiollm.rl.policy_gradient.settings import KLSettings

LOGITS = torch.tensor([0.3, -0.8, 1.1, 0.0, -1.7], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.5, 0.2, 0.9, -0.3], dtype=torch.float64).log_softmax(0)
OLD = (LOGITS + torch.tensor([0.2, 0.4, -0.5, 0.1, 0.3], dtype=torch.float64)).log_softmax(0)


def exact_kl(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(0)
    return (log_p.exp() * (log_p - REFERENCE)).sum()


def exact_gradient(logits: Tensor) -> Tensor:
    return torch.autograd.grad(exact_kl(logits), logits)[0]


def mean_gradient(settings: KLSettings, on_policy: bool) -> Tensor:
    """The mean over samples of old of the gradient of the KL's term: a sum over all outcomes."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    old = log_p.detach() if on_policy else OLD
    terms = kl_loss(log_p, REFERENCE, (log_p - old).exp(), settings)
    return torch.autograd.grad((old.exp() * terms).sum(), logits)[0]


@pytest.mark.parametrize(("estimator", "is_unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_mean_of_an_estimate(estimator: Any, is_unbiased: bool) -> None:
    log_p = LOGITS.log_softmax(0)
    found = float((log_p.exp() * kl_estimates(log_p, REFERENCE, estimator)).sum())
    exact = float(exact_kl(LOGITS))
    assert (abs(found - exact) < 1e-12) is is_unbiased
    assert abs(found - exact) < 0.5 * exact


def test_samples_have_that_mean_too_and_k3_varies_least() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = LOGITS.log_softmax(0)
    drawn = torch.multinomial(log_p.exp(), 100_000, replacement=True, generator=generator)
    deviations = {}
    for estimator in ("k1", "k3"):
        values = kl_estimates(log_p[drawn], REFERENCE[drawn], estimator)  # type: ignore[arg-type]
        deviations[estimator] = float(values.std())
        standard_error = float(values.std()) / math.sqrt(len(drawn))
        assert abs(float(values.mean() - exact_kl(LOGITS))) < 4 * standard_error
    assert deviations["k3"] < 0.7 * deviations["k1"]


EXACT_ON_POLICY = {
    ("k1", "plain"): False,
    ("k1", "ratio_corrected"): True,
    ("k1", "k2"): True,
    ("k2", "plain"): True,
    ("k2", "ratio_corrected"): False,
    ("k2", "k2"): True,
    ("k3", "plain"): False,
    ("k3", "ratio_corrected"): True,
    ("k3", "k2"): True,
}


@pytest.mark.parametrize("kind", EXACT_ON_POLICY)
def test_the_mean_gradient_in_the_loss(kind: tuple[Any, Any]) -> None:
    estimator, gradient = kind
    exact = exact_gradient(LOGITS.clone().requires_grad_())
    found = mean_gradient(KLSettings(estimator=estimator, gradient=gradient), on_policy=True)
    assert (float((found - exact).abs().max()) < 1e-12) is EXACT_ON_POLICY[kind]
    if kind == ("k1", "plain"):
        assert float(found.abs().max()) < 1e-12
    elif not EXACT_ON_POLICY[kind]:
        assert float((found - exact).abs().max()) > 0.02


def test_plain_k3_follows_the_other_kl() -> None:
    """Its mean gradient is that of KL(reference || policy)."""
    logits = LOGITS.clone().requires_grad_()
    forward = (REFERENCE.exp() * (REFERENCE - logits.log_softmax(0))).sum()
    (expected,) = torch.autograd.grad(forward, logits)
    torch.testing.assert_close(
        mean_gradient(KLSettings(gradient="plain"), True), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_after_updates_only_the_ratio_keeps_it_exact(estimator: Any) -> None:
    exact = exact_gradient(LOGITS.clone().requires_grad_())
    corrected = mean_gradient(KLSettings(estimator=estimator), on_policy=False)
    torch.testing.assert_close(corrected, exact, rtol=1e-12, atol=1e-12)
    k2 = mean_gradient(KLSettings(estimator=estimator, gradient="k2"), on_policy=False)
    assert float((k2 - exact).abs().max()) > 0.01


def test_in_the_reward_k1_gives_the_exact_gradient() -> None:
    """`-KL` as an advantage of the policy gradient: the gradient of the KL, up to its sign."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    penalty_T = -kl_estimates(log_p.detach(), REFERENCE, "k1")
    answer_T = torch.arange(5)
    shares = log_p.detach().exp() * 5  # every outcome once, weighted as often as it is drawn
    tokens = RolloutLogprobs(log_p, answer_T, 5, shares * penalty_T)
    counts = StepCounts.of(tokens.mask_T, answer_T, 5)
    loss = policy_loss(policy_term("clip", {}), tokens, counts).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(
        gradient, exact_gradient(LOGITS.clone().requires_grad_()), rtol=1e-12, atol=1e-12
    )


def test_the_estimate_in_the_reward_is_not_in_the_loss() -> None:
    log_p = LOGITS.log_softmax(0)
    tokens = RolloutLogprobs(log_p, torch.arange(5), 5, torch.ones(5).double(), reference_T=REFERENCE)
    counts = StepCounts.of(tokens.mask_T, tokens.answer_T, 5)
    term = policy_term("clip", {})
    rewarded = policy_loss(
        term, tokens, counts, Regularizers(KLSettings(estimator="k1", place="reward"), 0.5)
    )
    assert float(rewarded.loss) == float(policy_loss(term, tokens, counts).loss)
    assert float(rewarded.sums["kl"]) == pytest.approx(float((log_p - REFERENCE).sum()))


# ------------------------------------------------------------------------------------------- controllers

MEASURED = [12.0, 7.0, 6.0, 3.0, 0.0, 100.0]
EXPECTED = {
    "fixed": [0.2] * 6,
    "proportional": [0.204, 0.2074, 0.2074, 0.203252, 0.19918696, 0.2031707],
    "exponential": [0.20404027, 0.20746944, 0.20746944, 0.20336127, 0.19933444, 0.20336127],
    "horizon": [0.200256, 0.20046961, 0.20046961, 0.20021301],
}
"""Of KL* = 6 and a start at 0.2; the horizon's with 64 answers of 10,000."""


@pytest.mark.parametrize("name", EXPECTED)
def test_controllers_follow_the_vectors_of_the_facts(name: str) -> None:
    controller = kl_controller(name, {"coefficient": 0.2})
    for measured, expected in zip(MEASURED, EXPECTED[name], strict=False):
        controller.update(measured, 64)
        assert float(controller.coefficient) == pytest.approx(expected, abs=5e-9)
    assert set(EXPECTED) == set(CONTROLLERS) == set(KL_CONTROLLERS)


@pytest.mark.parametrize("name", EXPECTED)
def test_controllers_against_their_closed_form(name: str) -> None:
    values = (
        {"coefficient": 0.3} if name == "fixed" else {"coefficient": 0.3, "target": 0.5, "max_error": 0.4}
    )
    controller, expected = kl_controller(name, values), 0.3
    for step, measured in enumerate([0.1, 0.55, 3.0, 0.5, 0.45], start=1):
        controller.update(measured, 100 * step)
        e = max(-0.4, min(0.4, (measured - 0.5) / 0.5))
        expected *= {
            "fixed": 1.0,
            "proportional": 1 + 0.1 * e,
            "exponential": math.exp(0.1 * e),
            "horizon": 1 + e * 100 * step / 10_000,
        }[name]
        assert float(controller.coefficient) == pytest.approx(expected, rel=1e-12)


def test_the_state_of_a_controller_is_in_its_buffers() -> None:
    first, second = (kl_controller("proportional", {}) for _ in range(2))
    first.update(9.0, 8)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(4.0, 8)
    assert float(first.coefficient) == float(second.coefficient) != 0.2
    assert not list(first.parameters())


def test_an_adaptive_controller_brings_a_system_to_its_target() -> None:
    """Of a KL that falls as 1 / coefficient, all three end within 2 % of the target."""
    for name in ("proportional", "exponential", "horizon"):
        controller = kl_controller(name, {"coefficient": 1.0, "target": 0.5})
        for _ in range(400):
            controller.update(0.1 / float(controller.coefficient), 1000)
        assert 0.1 / float(controller.coefficient) == pytest.approx(0.5, rel=0.02)


def test_a_huge_step_does_not_switch_the_kl_off() -> None:
    controller = kl_controller("horizon", {"coefficient": 0.2, "horizon": 10.0})
    controller.update(0.0, 1000)
    assert float(controller.coefficient) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(FloatingPointError, match="which no controller can follow"):
        kl_controller("proportional", {}).update(value, 1)


def test_a_misspelt_controller_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'proportional'"):
        kl_controller("proportionl", {})
