"""Limits in which one objective or advantage is another, first updates, and numbers that are far out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.advantages import discounted_sums, next_values, raw_advantages
from audiollm.rl.policy_gradient.catalog import POLICY_OBJECTIVES, advantage_term, policy_term
from audiollm.rl.policy_gradient.kl import kl_loss
from audiollm.rl.policy_gradient.losses import Regularizers, StepCounts, entropy_threshold, policy_loss
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs, RolloutRewards, last_tokens
from audiollm.rl.policy_gradient.settings import CorrectionSettings, KLSettings
from audiollm.rl.policy_gradient.surrogates import ratios
from tests.audiollm.rl.policy_gradient.policy_cases import (
    LENGTHS,
    VARIANTS,
    Rollouts,
    counts_of,
    rollouts,
    whole_loss,
)

Evaluated = tuple[Tensor, Tensor]


def evaluated(
    name: str, values: dict[str, Any], data: Rollouts, tokens: RolloutLogprobs | None = None
) -> Evaluated:
    """Loss and gradient of a step, every answer of which counts."""
    policy = data.policy.clone().requires_grad_()
    tokens = replace(tokens or replace(data, kept=torch.ones_like(data.kept)).tokens(), policy_T=policy)
    loss = whole_loss(policy_term(name, values), tokens).loss
    return loss.detach(), torch.autograd.grad(loss, policy)[0]


def close(one: Evaluated, other: Evaluated) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def one_token_answers(seed: int = 0) -> Rollouts:
    data = rollouts(seed)
    return replace(data, answer=torch.arange(len(data.answer)))


def tokens_of(data: Rollouts) -> RolloutLogprobs:
    every = replace(data, kept=torch.ones_like(data.kept))
    return every.tokens(answers=int(data.answer.max()) + 1)


def answerwise(data: Rollouts) -> Rollouts:
    """The same advantage for all tokens of an answer."""
    values = torch.linspace(-1.2, 1.5, len(LENGTHS), dtype=torch.float64)
    return replace(data, advantage=values[data.answer])


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_without_a_bound_is_clip(seed: int) -> None:
    data = rollouts(seed, spread=1.0)
    close(evaluated("clip", {"dual_clip": 1e9}, data), evaluated("clip", {}, data))
    bounded, free = (evaluated("clip", values, data)[0] for values in ({"dual_clip": 1.1}, {}))
    assert bounded < free


def test_a_dual_clip_bounds_the_loss_of_a_token() -> None:
    data = rollouts(spread=3.0)
    data.advantage = -torch.ones_like(data.advantage)
    loss, gradient = evaluated("clip", {"dual_clip": 2.0, "average": "answer_sum"}, data)
    far = (data.policy - data.old).exp() > 2
    assert far.any() and float(gradient[far].abs().max()) == 0
    assert float(loss) <= 2 * len(data.policy) / len(LENGTHS)


@pytest.mark.parametrize("seed", range(3))
def test_two_sided_clipping_without_a_bound_is_clip(seed: int) -> None:
    data = rollouts(seed, spread=1.0)
    close(evaluated("clip", {"max_ratio": 1e9}, data), evaluated("clip", {}, data))


@pytest.mark.parametrize("level", ["sequence", "sequence_token", "product"])
def test_with_answers_of_one_token_every_level_is_the_token(level: str) -> None:
    data = one_token_answers()
    for average in ("token", "answer", "answer_sum"):
        values = {"level": level, "average": average}
        close(evaluated("clip", values, data, tokens_of(data)), evaluated("clip", {}, data, tokens_of(data)))


def test_with_answers_of_one_token_gspo_is_token_level_grpo() -> None:
    data, bounds = one_token_answers(), {"epsilon_low": 0.2, "epsilon_high": 0.2}
    grpo = evaluated("grpo", {}, data, tokens_of(data))
    for name in ("gspo", "gspo_token", "luspo"):
        close(evaluated(name, bounds, data, tokens_of(data)), grpo)


@pytest.mark.parametrize("seed", range(3))
def test_the_token_variant_of_gspo_has_its_value_and_gradient_where_advantages_are_equal(seed: int) -> None:
    data, bounds = answerwise(rollouts(seed)), {"epsilon_low": 0.1, "epsilon_high": 0.1}
    close(evaluated("gspo_token", bounds, data), evaluated("gspo", bounds, data))


def test_the_token_variant_of_gspo_gives_each_token_its_own_gradient() -> None:
    data = rollouts(1)
    bounds = {"epsilon_low": 10.0, "epsilon_high": 10.0}
    _, gradient = evaluated("gspo_token", bounds, data)
    ratio_T = ratios(tokens_of(data), "sequence")
    lengths = torch.bincount(data.answer)[data.answer]
    expected = -ratio_T * data.advantage / lengths / len(LENGTHS)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_equal_lengths_make_the_averages_one() -> None:
    data = rollouts()
    data = replace(answerwise(data), answer=torch.arange(len(data.answer)) % 6)
    tokens = tokens_of(data)
    by_token = evaluated("clip", {}, data, tokens)
    close(evaluated("grpo", {}, data, tokens), by_token)
    loss, gradient = evaluated("luspo", {}, data, tokens)
    sequence = evaluated("gspo", {"epsilon_low": 0.2, "epsilon_high": 0.2}, data, tokens)
    close((loss / 3, gradient / 3), sequence)
    policy = data.policy.clone().requires_grad_()
    tokens = replace(tokens, policy_T=policy)
    fixed = policy_loss(policy_term("dr_grpo", {}), tokens, replace(counts_of(tokens), max_tokens=3)).loss
    close((fixed.detach(), torch.autograd.grad(fixed, policy)[0]), by_token)


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
@pytest.mark.parametrize("with_old", [False, True])
def test_the_first_update_is_the_policy_gradient(name: str, with_old: bool) -> None:
    """Ratios are exactly 1, nothing is clipped, and the gradient is -A, over the objective's own count."""
    data = answerwise(rollouts())
    data.old = data.policy.clone()
    tokens = tokens_of(data)
    tokens = tokens if with_old else replace(tokens, old_T=None)
    term = policy_term(name, {})
    for level in ("token", "sequence", "sequence_token", "product"):
        assert ratios(tokens, level).tolist() == [1.0] * len(data.policy)  # type: ignore[arg-type]
    _, gradient = evaluated(name, {}, data, tokens)
    lengths = torch.bincount(data.answer)[data.answer].double()
    scale = {
        "token": torch.full_like(lengths, 1 / len(lengths)),
        "answer": 1 / lengths / len(LENGTHS),
        "answer_sum": torch.full_like(lengths, 1 / len(LENGTHS)),
        "fixed": torch.full_like(lengths, 1 / len(LENGTHS) / 7),
    }[term.settings.average]
    if name == "rloo":  # the gradient of a product reaches each token whole
        scale = scale * lengths
    torch.testing.assert_close(gradient, -data.advantage * scale, rtol=1e-12, atol=1e-12)
    figures = whole_loss(term, tokens).sums
    assert float(figures["clipped_low"]) == float(figures["clipped_high"]) == 0
    assert float(figures["ratio"]) == len(data.policy)


def test_cispo_without_a_bound_has_the_gradient_of_the_ratio() -> None:
    data, free = rollouts(spread=1.0), {"epsilon_low": 1e9, "epsilon_high": 1e9}
    torch.testing.assert_close(
        evaluated("cispo", {"max_ratio": 1e9}, data)[1],
        evaluated("clip", free, data)[1],
        rtol=1e-12,
        atol=1e-12,
    )


def test_clipped_tokens_have_no_gradient_but_those_of_cispo_do() -> None:
    data = rollouts(spread=1.0)
    data.advantage = torch.ones_like(data.advantage)
    risen = (data.policy - data.old).exp() > 1.2
    assert risen.any()
    assert float(evaluated("clip", {}, data)[1][risen].abs().max()) == 0
    assert float(evaluated("cispo", {"max_ratio": 1.2}, data)[1][risen].abs().min()) > 0


def test_all_tokens_are_top_entropy_tokens_at_a_share_of_one() -> None:
    data, term = rollouts(), policy_term("dapo", {})
    tokens = data.tokens()
    threshold = entropy_threshold(data.entropy[data.kept], 1.0)
    whole = policy_loss(term, tokens, counts_of(tokens, threshold))
    assert float(whole.loss) == float(whole_loss(term, tokens).loss)
    ten = torch.arange(10.0)
    assert [float(entropy_threshold(ten, share)) for share in (0.2, 0.5, 1 / 9)] == pytest.approx(
        [7.2, 4.5, 8.0]
    )
    assert float(entropy_threshold(torch.arange(36.0), 0.2)) == 28  # 0.8 * 35 is a little more in floats
    with pytest.raises(ValueError, match="share of top-entropy tokens"):
        entropy_threshold(data.entropy, 0.0)
    assert float(entropy_threshold(data.entropy[:0], 0.2)) == 0


# ----------------------------------------------------------------------------------------------- returns


def critic_inputs() -> RolloutRewards:
    data = rollouts()
    return RolloutRewards(data.answer, len(LENGTHS), reward_T=data.advantage, value_T=data.entropy)


def test_gae_at_lambda_one_is_the_return_minus_the_value() -> None:
    rewards = critic_inputs()
    assert rewards.reward_T is not None and rewards.value_T is not None
    returns = discounted_sums(rewards.reward_T, rewards.answer_T, len(LENGTHS), 0.9)
    raw = raw_advantages(advantage_term("gae", {"lam": 1.0, "gamma": 0.9}), rewards)
    assert raw.return_T is not None
    torch.testing.assert_close(raw.advantage_T, returns - rewards.value_T)
    torch.testing.assert_close(raw.return_T, returns)


def test_gae_at_lambda_zero_is_the_error_of_one_token() -> None:
    rewards = critic_inputs()
    assert rewards.reward_T is not None and rewards.value_T is not None
    following = next_values(rewards.value_T, rewards.answer_T, len(LENGTHS))
    raw = raw_advantages(advantage_term("gae", {"lam": 0.0, "gamma": 0.9}), rewards)
    torch.testing.assert_close(raw.advantage_T, rewards.reward_T + 0.9 * following - rewards.value_T)


def test_gae_without_values_is_reinforce_plus_plus() -> None:
    rewards = replace(critic_inputs(), value_T=torch.zeros(sum(LENGTHS), dtype=torch.float64))
    gae = raw_advantages(advantage_term("gae", {"lam": 1.0}), rewards).advantage_T
    torch.testing.assert_close(
        gae, raw_advantages(advantage_term("reinforce_plus_plus", {}), rewards).advantage_T
    )


def test_last_tokens_of_interleaved_answers() -> None:
    answer = torch.tensor([1, 0, 1, 3, 0])
    assert last_tokens(answer, 4).tolist() == [False, False, True, True, True]
    assert last_tokens(answer[:0], 4).tolist() == []
    assert discounted_sums(torch.zeros(0), answer[:0], 4, 1.0).tolist() == []


# --------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [-10_000.0, -50.0, 50.0, 10_000.0])
@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_far_log_ratios_give_finite_losses_and_gradients(
    name: str, values: dict[str, Any], distance: float, dtype: torch.dtype
) -> None:
    data = rollouts()
    tensors = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in vars(data).items()
    }
    data = Rollouts(**tensors)
    data.old = data.policy - distance
    policy = data.policy.requires_grad_()
    loss = whole_loss(policy_term(name, values), data.tokens()).loss
    assert loss.dtype == dtype
    (gradient,) = torch.autograd.grad(loss, policy)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("distance", [-10_000.0, 10_000.0])
@pytest.mark.parametrize("gradient", ["plain", "ratio_corrected", "k2"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_far_reference_gives_a_finite_kl(estimator: Any, gradient: Any, distance: float) -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    settings = KLSettings(estimator=estimator, gradient=gradient)
    loss = kl_loss(policy, policy.detach() + distance, torch.ones(2), settings).sum()
    assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, policy)[0].isfinite().all())


@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_a_call_in_which_nothing_counts_has_a_gradient_of_zero(name: str, values: dict[str, Any]) -> None:
    data = rollouts()
    data.kept = torch.zeros_like(data.kept)
    policy = data.policy.requires_grad_()
    added = Regularizers(KLSettings(), 0.1, 0.1)
    for settings in (None, CorrectionSettings()):
        loss = whole_loss(policy_term(name, values), data.tokens(settings), added).loss
        assert loss.item() == 0
        assert torch.autograd.grad(loss, policy)[0].tolist() == [0.0] * len(policy)


def test_counts_of_nothing_divide_by_one() -> None:
    counts = StepCounts.of(torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 1]), 2)
    assert [float(each) for each in (counts.tokens, counts.answers, counts.entropy_tokens)] == [1, 1, 1]
