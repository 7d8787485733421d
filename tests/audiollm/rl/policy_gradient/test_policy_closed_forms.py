"""Policy losses and advantages: values against plain Python, gradients by finite differences, critic and rewards."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.advantages import RAW_ADVANTAGES, raw_advantages, scaled_advantages
from audiollm.rl.policy_gradient.catalog import ADVANTAGES, POLICY_OBJECTIVES, advantage_term, policy_term
from audiollm.rl.policy_gradient.kl import kl_estimates
from audiollm.rl.policy_gradient.losses import Regularizers, entropy_threshold, ptx_loss, value_loss
from audiollm.rl.policy_gradient.moments import Moments
from audiollm.rl.policy_gradient.reward_shaping import (
    groups_without_variance,
    overlong_penalty,
    token_rewards,
    trained_answers,
)
from audiollm.rl.policy_gradient.rollout_batch import RolloutRewards
from audiollm.rl.policy_gradient.settings import (
    CorrectionSettings,
    KLSettings,
    TokenRewardSettings,
    ValueLossSettings,
)
from tests.audiollm.rl.policy_gradient import policy_closed_forms as forms
from tests.audiollm.rl.policy_gradient.policy_cases import (
    LENGTHS,
    MAX_TOKENS,
    VARIANTS,
    rollouts,
    whole_loss,
)

CORRECTIONS = {
    "none": None,
    "truncated tokens": CorrectionSettings(level="token", mode="truncate", cap=1.2, floor=0.5),
    "masked tokens": CorrectionSettings(level="token", mode="mask", cap=1.3),
    "masked answers": CorrectionSettings(level="sequence", mode="mask", cap=1.5),
    "exact": CorrectionSettings(level="token", cap=None),
}


def test_every_objective_and_advantage_is_tried() -> None:
    assert {name for name, _ in VARIANTS} == set(POLICY_OBJECTIVES)
    assert set(RAW_ADVANTAGES) == set(ADVANTAGES)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_losses_are_those_of_plain_python(name: str, values: dict[str, Any], correction: str) -> None:
    for seed in range(5):
        data, term = rollouts(seed), policy_term(name, values)
        tokens = data.tokens(CORRECTIONS[correction])
        answers = data.plain(tokens, by_sequence=correction == "masked answers")
        assert float(whole_loss(term, tokens).loss) == pytest.approx(
            forms.step_loss(name, answers, term.settings, MAX_TOKENS), rel=1e-10
        )
        for kind in (KLSettings(estimator="k2"), KLSettings(estimator="k1", gradient="plain")):
            added = Regularizers(kind, 0.3, 0.1)
            threshold = float(entropy_threshold(tokens.required("entropy_T")[tokens.mask_T], 0.5))
            expected = forms.step_loss(name, answers, term.settings, MAX_TOKENS, 0.3, kind, 0.1, threshold)
            assert float(whole_loss(term, tokens, added, 0.5).loss) == pytest.approx(expected, rel=1e-10)


DIFFERENTIATED = [each for each in VARIANTS if each[0] not in ("cispo", "vespo", "gspo_token")]
"""All that hold no factor constant; of the others see below, and `test_policy_limits`."""


@pytest.mark.parametrize("correction", ["none", "masked tokens"])
@pytest.mark.parametrize(("name", "values"), DIFFERENTIATED)
def test_gradients_are_those_of_finite_differences(
    name: str, values: dict[str, Any], correction: str
) -> None:
    data, term = rollouts(1), policy_term(name, values)
    added = Regularizers(KLSettings(), 0.3, 0.1)

    def loss(policy: Tensor, entropy: Tensor) -> Tensor:
        data.policy, data.entropy = policy, entropy
        return whole_loss(term, data.tokens(CORRECTIONS[correction]), added).loss

    leaves = (data.policy.clone().requires_grad_(), data.entropy.clone().requires_grad_())
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("name", ["cispo", "vespo"])
def test_constant_factors_times_the_gradient_of_the_log_probability(name: str) -> None:
    """Both losses are `-factor A log policy`, so the gradient is the loss over the log-probability."""
    data, term = rollouts(2), policy_term(name, {})
    data.policy.requires_grad_()
    tokens = data.tokens()
    (gradient,) = torch.autograd.grad(whole_loss(term, tokens).loss, data.policy)
    answers = data.plain(tokens)
    count = sum(len(answer.places) for answer in answers)
    for number, answer in enumerate(answers):
        own = gradient[data.answer == number].tolist()
        for t, found in enumerate(own):
            loss = forms.token_loss(name, answer, t, term.settings) if answer.kept[t] else 0.0
            assert found == pytest.approx(loss / answer.policy[t] / count, rel=1e-10)


# ------------------------------------------------------------------------------------------- advantages

REWARDS = [1.0, 0.0, 0.5, 2.0, math.nan, 1.0]
GROUPS = [0, 0, 0, 1, 1, 1]


def inputs(**fields: Any) -> RolloutRewards:
    data = rollouts()
    return RolloutRewards(data.answer, len(LENGTHS), torch.tensor(GROUPS), 2, **fields)


def computed(name: str, values: dict[str, Any], rewards: RolloutRewards) -> list[list[float]]:
    """Advantages of each answer's tokens, in order."""
    term = advantage_term(name, values)
    raw = raw_advantages(term, rewards)
    advantage_T = scaled_advantages(term, raw, Moments.of(raw.measured_N))
    return [advantage_T[rewards.answer_T == number].tolist() for number in range(rewards.num_answers)]


def by_answer(values: list[float]) -> list[list[float]]:
    return [[value] * length for value, length in zip(values, LENGTHS, strict=True)]


def same(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def scored(group: int) -> list[float]:
    return [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group and not math.isnan(r)]


def reward_tensor() -> Tensor:
    return torch.tensor(REWARDS, dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-9])
def test_grpo_over_groups_and_batch(epsilon: float) -> None:
    rewards = inputs(reward_A=reward_tensor())
    groups = [scored(group) for group in GROUPS]
    expected = [
        0.0 if math.isnan(r) else forms.normalized(r, group, epsilon)
        for r, group in zip(REWARDS, groups, strict=True)
    ]
    same(computed("grpo", {"epsilon": epsilon}, rewards), by_answer(expected))
    spread = forms.deviation(scored(0) + scored(1))
    centred = [0.0 if math.isnan(r) else r - mean(g) for r, g in zip(REWARDS, groups, strict=True)]
    same(computed("dr_grpo", {}, rewards), by_answer(centred))
    scaled = [value / (spread + epsilon) for value in centred]
    same(computed("grpo", {"scale": "batch", "epsilon": epsilon}, rewards), by_answer(scaled))


def test_reinforce_goes_from_step_to_step() -> None:
    """Steps end at the second and the last token of each answer; a discount of 0 leaves a step its own reward."""
    data = rollouts()
    ends, rewards_T = [], torch.zeros(len(data.answer), dtype=torch.float64)
    expected: dict[float, list[list[float]]] = {0.0: [], 0.5: []}
    for answer, length in enumerate(LENGTHS):
        place_L = (data.answer == answer).nonzero()[:, 0]
        first = min(1, length - 1)
        for number, at in enumerate(sorted({first, length - 1})):
            ends.append(int(place_L[at]))
            rewards_T[place_L[at]] = answer + 1 + 10 * number
        early, late = answer + 1.0, answer + 11.0
        for gamma, rows in expected.items():
            is_one = length <= 2
            rows.append([early] * length if is_one else [early + gamma * late] * 2 + [late] * (length - 2))
    rewards = inputs(reward_T=rewards_T, step_end_S=torch.tensor(ends), step_reward_S=torch.ones(len(ends)))
    for gamma, rows in expected.items():
        values = {"steps": True, "level": "step", "gamma": gamma, "whiten": False}
        same(computed("reinforce_plus_plus", values, rewards), rows)


def test_rloo_leaves_one_out() -> None:
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 2.0 - 1.0, 0.0, 1.0 - 2.0]
    same(computed("rloo", {}, inputs(reward_A=reward_tensor())), by_answer(expected))


def test_remax_and_its_missing_baseline() -> None:
    rewards = inputs(reward_A=reward_tensor(), greedy_reward_G=torch.tensor([0.25, math.nan]).double())
    same(computed("remax", {}, rewards), by_answer([0.75, -0.25, 0.25, 0.0, 0.0, 0.0]))
    kept = raw_advantages(advantage_term("remax", {}), rewards).kept_A
    assert kept.tolist() == [True, True, True, False, False, False]


def test_reinforce_plus_plus_with_baseline_whitens_over_tokens() -> None:
    centred = [0.5, -0.5, 0.0, 0.5, math.nan, -0.5]
    tokens = [
        value
        for value, length in zip(centred, LENGTHS, strict=True)
        for _ in range(length)
        if not math.isnan(value)
    ]
    expected = [0.0 if math.isnan(v) else forms.normalized(v, tokens, 1e-8) for v in centred]
    same(computed("reinforce_plus_plus_baseline", {}, inputs(reward_A=reward_tensor())), by_answer(expected))


def token_values(seed: int) -> tuple[Tensor, list[list[float]]]:
    """Values per token with those of answer 4 missing, as a tensor and by answer."""
    data = rollouts()
    values = torch.randn(len(data.answer), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values, [values[data.answer == number].tolist() for number in range(len(LENGTHS))]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_and_reinforce_plus_plus(gamma: float, lam: float, whiten: bool) -> None:
    (reward_T, reward_rows), (value_T, value_rows) = token_values(1), token_values(2)
    missing = int(torch.nonzero(rollouts().answer == 4)[0])
    reward_T[missing] = math.nan
    rewards = inputs(reward_T=reward_T, value_T=value_T)
    raw_gae = [forms.gae(r, v, gamma, lam) for r, v in zip(reward_rows, value_rows, strict=True)]
    raw_returns = [forms.returns(row, gamma) for row in reward_rows]
    for name, rows, settings in (
        ("gae", raw_gae, {"gamma": gamma, "lam": lam, "whiten": whiten}),
        ("reinforce_plus_plus", raw_returns, {"gamma": gamma, "whiten": whiten}),
    ):
        kept = [value for number, row in enumerate(rows) if number != 4 for value in row]
        expected = [[forms.normalized(x, kept, 1e-8) for x in row] for row in rows] if whiten else list(rows)
        expected[4] = [0.0]
        same(computed(name, settings, rewards), expected)
    raw = raw_advantages(advantage_term("gae", {"gamma": gamma, "lam": lam}), rewards)
    assert raw.return_T is not None and raw.kept_A.tolist() == [True, True, True, True, False, True]
    for number, (advantage, value) in enumerate(zip(raw_gae, value_rows, strict=True)):
        if number != 4:
            found = raw.return_T[rewards.answer_T == number].tolist()
            assert found == pytest.approx([a + v for a, v in zip(advantage, value, strict=True)], rel=1e-10)


def test_gae_of_the_facts() -> None:
    rewards = RolloutRewards(
        torch.zeros(3, dtype=torch.long),
        1,
        reward_T=torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
        value_T=torch.tensor([0.5, 0.4, 0.6], dtype=torch.float64),
    )
    assert computed("gae", {"whiten": False}, rewards)[0] == pytest.approx([0.451, 0.58, 0.4], abs=1e-12)
    returned = raw_advantages(advantage_term("gae", {}), rewards).return_T
    assert returned is not None
    assert returned.tolist() == pytest.approx([0.951, 0.98, 1.0], abs=1e-12)


STEPS = [
    [(1, 0.3), (4, 0.9)],
    [(1, 0.1)],
    [(0, 0.5), (1, 0.2), (2, 0.8)],
    [(0, 1.0), (3, 0.4)],
    [(0, 0.7)],
    [(2, 0.6)],
]


def step_inputs(missing: float | None = None) -> RolloutRewards:
    answer = rollouts().answer
    places = [torch.nonzero(answer == number).flatten().tolist() for number in range(len(LENGTHS))]
    ends = [places[number][end] for number, steps in enumerate(STEPS) for end, _ in steps]
    values = [
        missing if missing is not None and n == 4 else r for n, steps in enumerate(STEPS) for _, r in steps
    ]
    return inputs(step_reward_S=torch.tensor(values, dtype=torch.float64), step_end_S=torch.tensor(ends))


def test_process_supervision_adds_the_steps_that_are_still_to_come() -> None:
    expected = [
        row
        for group in (slice(0, 3), slice(3, 6))
        for row in forms.process(STEPS[group], LENGTHS[group], 1e-4)
    ]
    same(computed("grpo_process", {}, step_inputs()), expected)
    without = [STEPS[3], STEPS[5]]
    expected[3], expected[5] = forms.process(without, [LENGTHS[3], LENGTHS[5]], 1e-4)
    expected[4] = [0.0]
    rewards = step_inputs(math.nan)
    same(computed("grpo_process", {}, rewards), expected)
    assert not raw_advantages(advantage_term("grpo_process", {}), rewards).kept_A[4]


def test_an_outcome_is_normalised_among_the_outcomes_beside_the_steps() -> None:
    """The advantage is that of the steps alone and that of the outcome alone, added: more steps are no drawback."""
    data = rollouts()
    last = [int(torch.nonzero(data.answer == number).flatten()[-1]) for number in range(len(LENGTHS))]
    alone, outcomes = step_inputs(), reward_tensor()
    both = inputs(
        step_reward_S=torch.cat([alone.required("step_reward_S"), outcomes]),
        step_end_S=torch.cat([alone.required("step_end_S"), torch.tensor(last)]),
        is_outcome_S=torch.tensor([False] * sum(map(len, STEPS)) + [True] * len(LENGTHS)),
    )
    steps, outcome = computed("grpo_process", {}, alone), computed("grpo", {}, inputs(reward_A=outcomes))
    added = [[s + o for s, o in zip(*rows, strict=True)] for rows in zip(steps, outcome, strict=True)]
    same(computed("grpo_process", {}, both), added)


def test_process_supervision_with_one_step_per_answer_is_outcome_supervision() -> None:
    data = rollouts()
    last = [int(torch.nonzero(data.answer == number).flatten()[-1]) for number in range(len(LENGTHS))]
    for scale in ("group", "batch", "none"):
        steps = inputs(step_reward_S=reward_tensor(), step_end_S=torch.tensor(last))
        outcome = computed("grpo", {"scale": scale}, inputs(reward_A=reward_tensor()))
        same(computed("grpo_process", {"scale": scale}, steps), outcome)


def test_gdpo_gives_a_rare_function_the_same_weight() -> None:
    """In the sum, the function with the large values hides the other."""
    reward_AF = torch.tensor([[0.0, 10.0], [1.0, 10.0], [0.0, 30.0], [1.0, 30.0]]).double()
    rewards = RolloutRewards(
        torch.arange(4),
        4,
        torch.zeros(4, dtype=torch.long),
        1,
        reward_AF=reward_AF,
        weight_F=torch.ones(2, dtype=torch.float64),
    )
    found = [row[0] for row in computed("gdpo", {}, rewards)]
    assert found[1] == pytest.approx(0.0, abs=1e-3) and found[2] == pytest.approx(0.0, abs=1e-3)
    assert found[3] == pytest.approx(-found[0]) and found[3] > 1


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_nothing(name: str, dtype: torch.dtype) -> None:
    """0.1 added up six times and divided by 6 is not 0.1."""
    reward_A = torch.full((6,), 0.1, dtype=dtype)
    rewards = RolloutRewards(
        torch.arange(6),
        6,
        torch.zeros(6, dtype=torch.long),
        1,
        reward_A,
        reward_AF=reward_A[:, None],
        weight_F=torch.ones(1, dtype=dtype),
    )
    assert all(row == [0.0] for row in computed(name, {}, rewards))


# ------------------------------------------------------------------------------------ rewards and critic


def test_rewards_per_token_of_deepspeed_chat() -> None:
    data = rollouts()
    scores = torch.tensor([7.0, -9.0, 1.5, 0.0, math.nan, 4.0], dtype=torch.float64)
    kl_T = kl_estimates(data.old, data.reference, "k1")
    found = token_rewards(scores, kl_T, data.answer, 0.1, TokenRewardSettings())
    for number, score in enumerate(scores.tolist()):
        own = data.answer == number
        expected = [
            -0.1 * (o - r) for o, r in zip(data.old[own].tolist(), data.reference[own].tolist(), strict=True)
        ]
        expected[-1] += max(min(score, 5.0), -5.0) if not math.isnan(score) else math.nan
        assert found[own].tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    free = token_rewards(scores, None, data.answer, 0.1, TokenRewardSettings(score_clip=None))
    assert free.nansum() == pytest.approx(7.0 - 9.0 + 1.5 + 4.0)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_of_the_critic(clip: float | None) -> None:
    data = rollouts()
    (value, _), (old, _), (target, _) = token_values(1), token_values(2), token_values(3)
    value.requires_grad_()
    count = int(data.kept.sum())
    settings = ValueLossSettings(clip=clip)
    loss = value_loss(value, old, target, data.kept, count, settings)
    expected = 0.0
    for v, o, r, kept in zip(value.tolist(), old.tolist(), target.tolist(), data.kept.tolist(), strict=True):
        near = o + forms.clip(v - o, -0.2, 0.2)
        errors = [(v - r) ** 2] + ([(near - r) ** 2] if clip else [])
        expected += max(errors) / 2 / count if kept else 0.0
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, data.kept, count, settings), value)


def test_ptx_is_the_weighted_mean_cross_entropy() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss = ptx_loss(logprobs[:2], 3, 27.8) + ptx_loss(logprobs[2:], 3, 27.8)
    assert loss.item() == pytest.approx(27.8 * 3.5 / 3)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-27.8 / 3] * 3)


def test_the_overlong_penalty_of_dapo() -> None:
    lengths = torch.tensor([0.0, 12.0, 13.0, 14.0, 16.0, 20.0])
    assert overlong_penalty(lengths, 16, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer must be from 1 to max_tokens"):
        overlong_penalty(lengths, 16, 17)


def test_truncated_answers_and_groups_without_variance() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, math.nan, 0.5, math.nan, math.nan])
    truncated = torch.tensor([False, True, False, False, True, False, False, False])
    assert trained_answers(rewards).tolist() == [True, True, True, True, False, True, False, False]
    assert trained_answers(rewards, truncated).tolist() == [
        True,
        False,
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert groups_without_variance(rewards, groups, 4).tolist() == [True, False, True, True]
