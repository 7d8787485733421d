"""For given rollouts, advantages, losses and gradients of a step are the same at any split into packs and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.advantages import RawAdvantages, raw_advantages, scaled_advantages
from audiollm.rl.policy_gradient.catalog import ADVANTAGES, advantage_term, policy_term
from audiollm.rl.policy_gradient.losses import (
    Regularizers,
    entropy_threshold,
    policy_loss,
    ptx_loss,
    value_loss,
)
from audiollm.rl.policy_gradient.moments import Moments, whitened
from audiollm.rl.policy_gradient.rollout_batch import RolloutRewards
from audiollm.rl.policy_gradient.settings import CorrectionSettings, KLSettings, ValueLossSettings
from tests.audiollm.rl.policy_gradient.policy_cases import (
    LENGTHS,
    VARIANTS,
    Rollouts,
    counts_of,
    rollouts,
)

TOLERANCE = 1e-9
SPLITS: list[list[list[int]]] = [
    [[0, 1, 2], [3, 4, 5]],
    [[number] for number in range(len(LENGTHS))],
    [[5, 0], [4], [], [2, 1, 3]],
]
"""Answers of each pack or rank; answer 4 has no reward, so one part has nothing to train on."""
CORRECTIONS = [
    None,
    CorrectionSettings(level="token", mode="mask", cap=1.2),
    CorrectionSettings(level="sequence", mode="truncate", cap=1.1),
]
ADDED = Regularizers(KLSettings(), 0.3, 0.1)


def step(
    data: Rollouts,
    split: Sequence[Sequence[int]],
    name: str,
    values: dict[str, Any],
    correction: CorrectionSettings | None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradients and figures of a step whose counts are added over its parts."""
    policy, entropy = data.policy.clone().requires_grad_(), data.entropy.clone().requires_grad_()
    leaves = replace(data, policy=policy, entropy=entropy)
    parts = [leaves.part(answers).tokens(correction, len(answers)) for answers in split]
    gathered = torch.cat([part.required("entropy_T")[part.mask_T] for part in parts])
    threshold = entropy_threshold(gathered, 0.6)
    counts = reduce(add, (counts_of(part, threshold) for part in parts))
    losses = [policy_loss(policy_term(name, values), part, counts, ADDED) for part in parts]
    total = reduce(add, (each.loss for each in losses))
    gradients = torch.autograd.grad(total, (policy, entropy))
    sums = {name: reduce(add, (each.sums[name] for each in losses)) for name in losses[0].sums}
    return total.detach(), *gradients, sums


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda each: each and f"{each.level}-{each.mode}")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_the_update_is_the_same_at_any_split(
    name: str, values: dict[str, Any], split: list[list[int]], correction: CorrectionSettings | None
) -> None:
    data = rollouts(3)
    whole = step(data, [range(len(LENGTHS))], name, values, correction)
    parts = step(data, split, name, values, correction)
    for one, other in zip(whole[:3], parts[:3], strict=True):
        torch.testing.assert_close(other, one, rtol=TOLERANCE, atol=TOLERANCE)
    for figure, value in whole[3].items():
        torch.testing.assert_close(parts[3][figure], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert whole[1].abs().max() > 0


def group_part(rewards: RolloutRewards, groups: Sequence[int]) -> tuple[RolloutRewards, Tensor]:
    """Some groups of a step with answers, tokens, groups and steps renumbered, and the places of their tokens."""
    group_A = rewards.required("group_A")
    answers = torch.nonzero(torch.isin(group_A, torch.tensor(groups))).flatten()
    number_A = torch.full_like(group_A, -1)
    number_A[answers] = torch.arange(len(answers))
    inside_T = number_A[rewards.answer_T] >= 0
    places = torch.nonzero(inside_T).flatten()
    place_T = torch.full_like(rewards.answer_T, -1)
    place_T[places] = torch.arange(len(places))
    step_end_S = rewards.required("step_end_S")
    inside_S = inside_T[step_end_S]
    part = RolloutRewards(
        number_A[rewards.answer_T][inside_T],
        len(answers),
        torch.searchsorted(torch.tensor(sorted(groups)), group_A[answers]),
        len(groups),
        rewards.required("reward_A")[answers],
        rewards.required("reward_AF")[answers],
        rewards.required("weight_F"),
        rewards.required("greedy_reward_G")[sorted(groups)],
        rewards.required("reward_T")[inside_T],
        rewards.required("value_T")[inside_T],
        rewards.required("step_reward_S")[inside_S],
        place_T[step_end_S[inside_S]],
        rewards.required("is_outcome_S")[inside_S],
    )
    return part, places


def rewards_of_a_step() -> RolloutRewards:
    generator = torch.Generator().manual_seed(4)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    data = rollouts()
    total = len(data.answer)
    reward_A, reward_T, reward_AF = noise(6), noise(total), noise(6, 2)
    reward_A[4] = reward_AF[4, 1] = reward_T[int(torch.nonzero(data.answer == 4)[0])] = math.nan
    return RolloutRewards(
        data.answer,
        6,
        torch.tensor([0, 1, 0, 2, 1, 2]),
        3,
        reward_A,
        reward_AF,
        torch.tensor([1.0, 0.3], dtype=torch.float64),
        noise(3),
        reward_T,
        noise(total),
        noise(5),
        torch.tensor([0, 3, 7, 11, total - 1]),
        torch.tensor([False, True, False, False, True]),
    )


SCALED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ADVANTAGES),
    ("grpo", {"scale": "batch"}),
    ("grpo_process", {"scale": "batch"}),
    ("rloo", {"whiten": True}),
]


@pytest.mark.parametrize("split", [[[0], [1], [2]], [[0, 2], [1]], [[1, 2], [0]]])
@pytest.mark.parametrize(("name", "values"), SCALED)
def test_advantages_are_the_same_at_any_split_of_groups(
    name: str, values: dict[str, Any], split: list[list[int]]
) -> None:
    term, rewards = advantage_term(name, values), rewards_of_a_step()
    raw = raw_advantages(term, rewards)
    whole = scaled_advantages(term, raw, Moments.of(raw.measured_N))
    parts = [group_part(rewards, groups) for groups in split]
    raws: list[RawAdvantages] = [raw_advantages(term, part) for part, _ in parts]
    moments = reduce(add, (Moments.of(each.measured_N) for each in raws))
    found = torch.full_like(whole, math.nan)
    for each, (_, places) in zip(raws, parts, strict=True):
        found[places] = scaled_advantages(term, each, moments)
        if raw.return_T is not None and each.return_T is not None:
            torch.testing.assert_close(each.return_T, raw.return_T[places], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found, whole, rtol=TOLERANCE, atol=TOLERANCE)
    assert whole.abs().max() > 0


def test_critic_and_ptx_are_the_same_at_any_split() -> None:
    data = rollouts()
    old, target = data.old, data.reference
    settings, count = ValueLossSettings(), int(data.kept.sum())
    whole = value_loss(data.policy, old, target, data.kept, count, settings)
    for split in SPLITS:
        parts = [torch.isin(data.answer, torch.tensor(answers)) for answers in split]
        shares = [
            value_loss(data.policy[part], old[part], target[part], data.kept[part], count, settings)
            for part in parts
        ]
        assert float(sum(shares)) == pytest.approx(float(whole), rel=1e-12)
        ptx = sum(float(ptx_loss(data.policy[part], len(data.policy), 2.0)) for part in parts)
        assert ptx == pytest.approx(float(-2 * data.policy.mean()), rel=1e-12)


def test_moments_are_those_of_all_values() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 100
    moments = reduce(add, (Moments.of(part) for part in values.split([7, 1, 0, 42])))
    assert float(moments.mean) == pytest.approx(float(values.mean()), rel=1e-12)
    assert float(moments.deviation) == pytest.approx(float(values.std()), rel=1e-9)
    white = whitened(values, moments, 0.0)
    assert float(white.mean()) == pytest.approx(0, abs=1e-9)
    assert float(white.std()) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7, [1e6 + 0.1] * 11])
def test_values_that_are_all_equal_are_whitened_to_nothing(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    assert whitened(tensor, Moments.of(tensor), 0.0).tolist() == [0.0] * len(values)
