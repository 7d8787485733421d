"""Every policy loss and advantage of TRL 1.16 in value and gradient, against TRL itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.advantages import raw_advantages, scaled_advantages
from audiollm.rl.policy_gradient.catalog import advantage_term, policy_term
from audiollm.rl.policy_gradient.corrections import importance_weights
from audiollm.rl.policy_gradient.kl import kl_estimates
from audiollm.rl.policy_gradient.losses import (
    PolicyLoss,
    Regularizers,
    StepCounts,
    entropy_threshold,
    policy_loss,
)
from audiollm.rl.policy_gradient.moments import Moments
from audiollm.rl.policy_gradient.reward_shaping import penalized_rewards
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs, RolloutRewards
from audiollm.rl.policy_gradient.settings import CorrectionSettings, KLSettings
from tests.audiollm.rl.policy_gradient.trl_policy_calls import (
    LENGTHS,
    MAX_TOKENS,
    PaddedRollouts,
    padded_rollouts,
    trl_advantages,
    trl_grpo,
    trl_rloo,
    trl_rloo_advantages,
)

pytest.importorskip("trl", reason="parity with TRL needs the extra `test`: pip install 'audiollm[test]'")

TOLERANCE = 1e-6


def deviations(ours: Tensor, theirs: Tensor, leaf: Tensor) -> float:
    """The larger of the relative deviations of a loss and of its gradient."""
    (our_gradient,) = torch.autograd.grad(ours, leaf, retain_graph=True)
    (their_gradient,) = torch.autograd.grad(theirs, leaf, retain_graph=True)
    assert their_gradient.abs().max() > 0
    value = (ours - theirs).abs().detach() / theirs.abs().detach()
    return max(float(value), float((our_gradient - their_gradient).abs().max() / their_gradient.abs().max()))


def our_loss(
    tokens: RolloutLogprobs,
    name: str,
    values: dict[str, Any],
    regularizers: Regularizers | None = None,
    top_share: float = 1.0,
) -> PolicyLoss:
    mask_T, threshold = tokens.mask_T, None
    if top_share < 1:
        threshold = entropy_threshold(tokens.required("entropy_T")[mask_T], top_share)
    counts = StepCounts.of(
        mask_T, tokens.answer_T, tokens.num_answers, MAX_TOKENS, tokens.entropy_T, threshold
    )
    return policy_loss(policy_term(name, values), tokens, counts, regularizers)


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("grpo", {}, "grpo", {}),
    ("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, "grpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    ("grpo", {"max_ratio": 1.5}, "grpo", {"delta": 1.5}),
    ("bnpo", {}, "bnpo", {}),
    ("clip", {}, "bnpo", {}),
    ("dapo", {}, "dapo", {"epsilon_high": 0.28}),
    ("dapo", {"epsilon_high": 0.2}, "dapo", {}),
    ("dr_grpo", {}, "dr_grpo", {}),
    ("gspo", {}, "grpo", {**SEQUENCE, "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    ("gspo", {"epsilon_low": 0.2, "epsilon_high": 0.2}, "grpo", SEQUENCE),
    ("luspo", {}, "luspo", SEQUENCE),
    ("cispo", {}, "cispo", {"epsilon_high": 5.0}),
    ("cispo", {"max_ratio": 1.1}, "cispo", {"epsilon_high": 1.1}),
    ("sapo", {}, "sapo", {}),
    (
        "sapo",
        {"temperature_positive": 2.0, "temperature_negative": 3.0},
        "sapo",
        {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    ("vespo", {}, "vespo", {}),
    (
        "vespo",
        {"k_positive": 1.0, "lambda_negative": 1.0},
        "vespo",
        {"vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0},
    ),
]
KL_CASES: dict[str, tuple[KLSettings | None, dict[str, Any]]] = {
    "no KL": (None, {}),
    "TRL's default": (KLSettings(), {"beta": 0.04}),
    "plain k3": (KLSettings(gradient="plain"), {"beta": 0.04, "use_bias_correction_kl": False}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kl", KL_CASES)
@pytest.mark.parametrize(("name", "values", "loss_type", "options"), CASES)
def test_losses_of_the_grpo_trainer(
    name: str, values: dict[str, Any], loss_type: str, options: dict[str, Any], kl: str, seed: int
) -> None:
    batch, (kind, kl_options) = padded_rollouts(seed), KL_CASES[kl]
    theirs, _ = trl_grpo(batch, loss_type, **options, **kl_options)
    ours = our_loss(batch.flat(), name, values, Regularizers(kind, 0.04 if kind else 0.0))
    assert deviations(ours.loss, theirs, batch.policy) < TOLERANCE


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("name", ["bnpo", "grpo", "dr_grpo", "cispo", "vespo"])
def test_top_entropy_tokens_and_entropy_bonus(name: str, share: float) -> None:
    batch = padded_rollouts()
    batch.entropy.requires_grad_()
    options = {"epsilon_high": 5.0} if name == "cispo" else {}
    for weight in (0.0, 0.3):
        theirs, _ = trl_grpo(
            batch, name, top_entropy_quantile=share, entropy_coef=weight, beta=0.04, **options
        )
        added = Regularizers(KLSettings(), 0.04, weight)
        ours = our_loss(batch.flat(), name, {}, added, share).loss
        assert deviations(ours, theirs, batch.policy) < TOLERANCE
    assert deviations(ours, theirs, batch.entropy) < TOLERANCE


@pytest.mark.parametrize("epsilons", [(0.2, 0.2), (0.05, 0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_of_the_rloo_trainer(seed: int, epsilons: tuple[float, float]) -> None:
    batch = padded_rollouts(seed, spread=0.1)
    ours = our_loss(batch.flat(), "rloo", {"epsilon_low": epsilons[0], "epsilon_high": epsilons[1]}).loss
    assert deviations(ours, trl_rloo(batch, *epsilons), batch.policy) < TOLERANCE


def test_shares_of_clipped_tokens_and_the_mean_kl() -> None:
    batch = padded_rollouts()
    ours = our_loss(batch.flat(), "grpo", {}, Regularizers(KLSettings(gradient="plain"), 0.04)).sums
    _, theirs = trl_grpo(batch, "grpo", beta=0.04, use_bias_correction_kl=False)
    means = {name: float(value) / sum(LENGTHS) for name, value in ours.items()}
    assert means["clipped_low"] == pytest.approx(theirs["clip_ratio/low_mean"][0], abs=TOLERANCE)
    assert means["clipped_high"] == pytest.approx(theirs["clip_ratio/high_mean"][0], abs=TOLERANCE)
    assert means["kl"] == pytest.approx(theirs["kl"][0], abs=TOLERANCE)
    assert means["entropy"] == pytest.approx(theirs["entropy"][0], abs=TOLERANCE)


def sampled_elsewhere(batch: PaddedRollouts) -> Tensor:
    noise = torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return batch.old + 0.4 * noise


WEIGHTED = [
    *(("token", name) for name in ("grpo", "dapo", "cispo", "vespo")),
    *(("sequence", name) for name in ("grpo", "dapo", "cispo")),  # TRL refuses those of VESPO
]


@pytest.mark.parametrize(("level", "name"), WEIGHTED)
@pytest.mark.parametrize("bounds", [(None, 1.3), (0.8, 1.3), (None, None)])
def test_truncated_importance_weights(
    name: str, level: str, bounds: tuple[float | None, float | None]
) -> None:
    batch = padded_rollouts()
    behaviour, mask = sampled_elsewhere(batch), batch.mask
    difference = (batch.old - behaviour) * mask
    if level == "sequence":
        difference = difference.sum(1, keepdim=True)
    floor, cap = bounds
    weights = difference.exp() if floor is cap is None else difference.exp().clamp(floor, cap)
    options = {"epsilon_high": 5.0} if name == "cispo" else {"epsilon_high": 0.2}
    theirs, _ = trl_grpo(batch, name, weights, beta=0.04, use_bias_correction_kl=False, **options)
    settings = CorrectionSettings(level=level, mode="truncate", cap=cap, floor=floor)
    flat = batch.flat()
    correction = importance_weights(
        behaviour[mask], batch.old[mask], flat.answer_T, flat.num_answers, settings
    )
    values = {} if name in ("cispo", "vespo") else {"epsilon_high": 0.2}
    added = Regularizers(KLSettings(gradient="plain"), 0.04)
    ours = our_loss(batch.flat(correction), name, values, added).loss
    assert deviations(ours, theirs, batch.policy) < TOLERANCE


GROUP = 4


def rewards_with_gaps(seed: int, gaps: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    rewards[4:8] = 1.0  # a group without variance
    if gaps:
        rewards[0] = torch.nan
        rewards[9, 1] = torch.nan
        rewards[12:15] = torch.nan  # a group with one answer left
    return rewards


def combined_rewards(reward_AF: Tensor, weight_F: Tensor, clip: tuple[float, float] | None = None) -> Tensor:
    """TRL's sums of rewards: a function that gave none counts 0; NaN where all gave none."""
    total_A = (reward_AF.nan_to_num(nan=0.0) * weight_F).sum(1)
    total_A = total_A if clip is None else total_A.clamp(*clip)
    return total_A.masked_fill(reward_AF.isnan().all(1), torch.nan)


def our_advantages(name: str, values: dict[str, Any], rewards: RolloutRewards) -> Tensor:
    term = advantage_term(name, values)
    raw = raw_advantages(term, rewards)
    return scaled_advantages(term, raw, Moments.of(raw.measured_N))


def one_token_each(
    rewards: Tensor, weights: Tensor, clip: tuple[float, float] | None = None
) -> RolloutRewards:
    answers = len(rewards)
    return RolloutRewards(
        torch.arange(answers),
        answers,
        torch.arange(answers) // GROUP,
        answers // GROUP,
        combined_rewards(rewards, weights, clip),
        reward_AF=rewards,
        weight_F=weights,
    )


WEIGHTS = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_the_grpo_trainer(scale: str, seed: int, gaps: bool) -> None:
    rewards = rewards_with_gaps(seed, gaps)
    ours = our_advantages("grpo", {"scale": scale}, one_token_each(rewards, WEIGHTS))
    theirs = trl_advantages(rewards, WEIGHTS, GROUP, scale, "sum_then_normalize")
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    if scale == "none":
        torch.testing.assert_close(our_advantages("dr_grpo", {}, one_token_each(rewards, WEIGHTS)), ours)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_gdpo_is_normalize_then_sum(seed: int, gaps: bool) -> None:
    rewards = rewards_with_gaps(seed, gaps)
    ours = our_advantages("gdpo", {}, one_token_each(rewards, WEIGHTS))
    theirs = trl_advantages(rewards, WEIGHTS, GROUP, "group", "normalize_then_sum")
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("clip", [None, (-1.0, 1.5)])
def test_advantages_of_the_rloo_trainer(clip: tuple[float, float] | None, whiten: bool, gaps: bool) -> None:
    rewards = rewards_with_gaps(0, gaps)
    ours = our_advantages("rloo", {"whiten": whiten}, one_token_each(rewards, WEIGHTS, clip))
    theirs = trl_rloo_advantages(
        rewards, WEIGHTS, GROUP, None, normalize_advantages=whiten, reward_clip_range=clip
    )
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_rloo_with_the_kl_in_the_reward() -> None:
    batch, rewards = padded_rollouts(), rewards_with_gaps(0, False)[:8]
    tokens = batch.flat()
    kl_T = kl_estimates(batch.old[batch.mask], batch.reference[batch.mask], "k1")
    total_A = penalized_rewards(combined_rewards(rewards, WEIGHTS), kl_T, tokens.answer_T, 0.05)
    inputs = RolloutRewards(tokens.answer_T, 8, torch.arange(8) // GROUP, 2, total_A)
    theirs = trl_rloo_advantages(rewards, WEIGHTS, GROUP, batch, beta=0.05)
    torch.testing.assert_close(
        our_advantages("rloo", {}, inputs), theirs[tokens.answer_T], rtol=TOLERANCE, atol=TOLERANCE
    )


def test_defaults_of_trl_are_ours_or_options() -> None:
    """TRL's GRPO is `dapo` clipped at 0.2 on both sides, without KL, by `grpo` advantages of the group."""
    from dataclasses import fields

    from trl import GRPOConfig, RLOOConfig

    trl = {field.name: field.default for field in fields(GRPOConfig)}
    assert (trl["loss_type"], trl["beta"], trl["epsilon"], trl["epsilon_high"]) == ("dapo", 0.0, 0.2, None)
    assert trl["importance_sampling_level"] == "token" and trl["delta"] is None
    assert (trl["scale_rewards"], trl["top_entropy_quantile"]) == ("group", 1.0)
    assert trl["use_bias_correction_kl"] and KLSettings().gradient == "ratio_corrected"
    mode, cap = trl["vllm_importance_sampling_mode"], trl["vllm_importance_sampling_clip_max"]
    correction = CorrectionSettings()
    assert (f"{correction.level}_{correction.mode}", correction.cap) == (mode, cap)
    sapo, vespo = policy_term("sapo", {}).settings, policy_term("vespo", {}).settings
    assert vars(sapo)["temperature_positive"] == trl["sapo_temperature_pos"]
    assert vars(sapo)["temperature_negative"] == trl["sapo_temperature_neg"]
    for ours, theirs in (("k_positive", "k_pos"), ("lambda_positive", "lambda_pos")):
        assert vars(vespo)[ours] == trl[f"vespo_{theirs}"]
    for ours, theirs in (("k_negative", "k_neg"), ("lambda_negative", "lambda_neg")):
        assert vars(vespo)[ours] == trl[f"vespo_{theirs}"]
    rloo = {field.name: field.default for field in fields(RLOOConfig)}
    assert (rloo["beta"], rloo["epsilon"], rloo["normalize_advantages"]) == (0.05, 0.2, False)
