"""Whole steps: PPO as DeepSpeed-Chat has it, and every objective and advantage on a problem of two tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.rl.policy_gradient.advantages import raw_advantages, scaled_advantages
from audiollm.rl.policy_gradient.catalog import (
    ADVANTAGES,
    POLICY_OBJECTIVES,
    AdvantageTerm,
    PolicyTerm,
    advantage_term,
    policy_term,
)
from audiollm.rl.policy_gradient.kl import kl_estimates
from audiollm.rl.policy_gradient.losses import StepCounts, policy_loss, value_loss
from audiollm.rl.policy_gradient.moments import Moments
from audiollm.rl.policy_gradient.reward_shaping import token_rewards
from audiollm.rl.policy_gradient.rollout_batch import RolloutLogprobs, RolloutRewards, last_tokens
from audiollm.rl.policy_gradient.settings import TokenRewardSettings, ValueLossSettings
from tests.audiollm.rl.policy_gradient import policy_closed_forms as forms
from tests.audiollm.rl.policy_gradient.policy_cases import LENGTHS, MAX_TOKENS, rollouts, whole_loss


def test_a_step_of_deepspeed_chat() -> None:
    """Reward -0.1 k1 with the score cut to 5 on the last token; gamma 1, lambda 0.95, both clips 0.2, no whitening."""
    data = rollouts(3)
    data.kept = torch.ones_like(data.kept)
    generator = torch.Generator().manual_seed(7)
    old_value, value = torch.randn(2, sum(LENGTHS), generator=generator, dtype=torch.float64)
    score = 4 * torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    kl_T = kl_estimates(data.old, data.reference, "k1")
    reward_T = token_rewards(score, kl_T, data.answer, 0.1, TokenRewardSettings())
    inputs = RolloutRewards(data.answer, len(LENGTHS), reward_T=reward_T, value_T=old_value)
    term = advantage_term("gae", {"whiten": False})
    raw = raw_advantages(term, inputs)
    data.advantage = scaled_advantages(term, raw, Moments.of(raw.measured_N))
    assert raw.return_T is not None
    actor = whole_loss(policy_term("clip", {}), data.tokens()).loss
    critic = value_loss(value, old_value, raw.return_T, data.kept, sum(LENGTHS), ValueLossSettings())

    actor_sum = critic_sum = 0.0
    for number, final in enumerate(score.tolist()):
        columns = (data.policy, data.old, data.reference, value, old_value)
        now, old, reference, new_v, old_v = (each[data.answer == number].tolist() for each in columns)
        rewards = [-0.1 * (o - r) for o, r in zip(old, reference, strict=True)]
        rewards[-1] += max(-5.0, min(5.0, final))
        advantages = forms.gae(rewards, old_v, 1.0, 0.95)
        for t, advantage in enumerate(advantages):
            ratio = math.exp(now[t] - old[t])
            actor_sum += max(-advantage * ratio, -advantage * forms.clip(ratio, 0.8, 1.2))
            near = forms.clip(new_v[t], old_v[t] - 0.2, old_v[t] + 0.2)
            target = advantage + old_v[t]
            critic_sum += 0.5 * max((new_v[t] - target) ** 2, (near - target) ** 2)
    assert float(actor) == pytest.approx(actor_sum / sum(LENGTHS), rel=1e-12)
    assert float(critic) == pytest.approx(critic_sum / sum(LENGTHS), rel=1e-12)


REWARDS = torch.tensor([[0.0, 0.2, 0.1], [0.3, 0.0, 1.0], [0.1, 0.4, 0.0]], dtype=torch.float64)
GROUP, PROMPTS, STEPS = 8, 4, 150


class TwoTokenPolicy:
    """Logits of a first token, and of a second one that depends on it; a critic of a value for each."""

    def __init__(self) -> None:
        self.first = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        self.second = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        self.values = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def logprobs(self, drawn_AN: Tensor) -> Tensor:
        """Token after token, answer after answer."""
        one, two = drawn_AN.unbind(1)
        return torch.stack(
            [self.first.log_softmax(0)[one], self.second.log_softmax(1)[one, two]], 1
        ).flatten()

    def value_T(self, drawn_AN: Tensor) -> Tensor:
        one = drawn_AN[:, 0]
        return torch.stack([self.values[3].expand(len(one)), self.values[one]], 1).flatten()

    def draw(self, generator: torch.Generator) -> Tensor:
        one = torch.multinomial(self.first.softmax(0), GROUP * PROMPTS, replacement=True, generator=generator)
        two = torch.multinomial(self.second.softmax(1)[one], 1, generator=generator).flatten()
        return torch.stack([one, two], 1)

    def expected_reward(self) -> float:
        return (self.first.softmax(0)[:, None] * self.second.softmax(1) * REWARDS).sum().item()

    def greedy_reward(self) -> Tensor:
        one = int(self.first.argmax())
        return REWARDS[one, int(self.second[one].argmax())]


def rewards_of(policy: TwoTokenPolicy, drawn: Tensor) -> RolloutRewards:
    reward_A = REWARDS[drawn[:, 0], drawn[:, 1]]
    answers = len(drawn)
    answer_T = torch.arange(answers).repeat_interleave(2)
    return RolloutRewards(
        answer_T,
        answers,
        torch.arange(answers) // GROUP,
        PROMPTS,
        reward_A,
        reward_A[:, None],
        torch.ones(1, dtype=torch.float64),
        policy.greedy_reward().expand(PROMPTS),
        torch.where(last_tokens(answer_T, answers), reward_A[answer_T], 0.0),
        policy.value_T(drawn).detach(),
        reward_A,
        2 * torch.arange(answers) + 1,
    )


def train(advantage: AdvantageTerm, objective: PolicyTerm) -> float:
    """The expected reward after steps of two updates each."""
    policy, generator = TwoTokenPolicy(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([policy.first, policy.second, policy.values], lr=1.0)
    for _ in range(STEPS):
        drawn = policy.draw(generator)
        old_T, rewards = policy.logprobs(drawn).detach(), rewards_of(policy, drawn)
        raw = raw_advantages(advantage, rewards)
        advantage_T = scaled_advantages(advantage, raw, Moments.of(raw.measured_N))
        for _ in range(2):
            tokens = RolloutLogprobs(
                policy.logprobs(drawn), rewards.answer_T, rewards.num_answers, advantage_T, old_T
            )
            counts = StepCounts.of(tokens.mask_T, tokens.answer_T, tokens.num_answers, MAX_TOKENS)
            loss = policy_loss(objective, tokens, counts).loss
            if raw.return_T is not None and rewards.value_T is not None:
                mask_T, values_T = tokens.mask_T, policy.value_T(drawn)
                settings = ValueLossSettings()
                loss = loss + value_loss(
                    values_T, rewards.value_T, raw.return_T, mask_T, counts.tokens, settings
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return policy.expected_reward()


PAIRED: list[tuple[str, str, dict[str, Any]]] = [
    *((advantage, "clip", {}) for advantage in ADVANTAGES),
    *(("grpo", objective, {}) for objective in POLICY_OBJECTIVES if not objective.startswith("gspo")),
    *(("grpo", objective, {"epsilon_low": 0.2, "epsilon_high": 0.2}) for objective in ("gspo", "gspo_token")),
]


@pytest.mark.parametrize(("advantage", "objective", "values"), PAIRED)
def test_the_expected_reward_rises(advantage: str, objective: str, values: dict[str, Any]) -> None:
    """From 0.23 of random answers; the best answer has 1, and the best first token without its second 0.43."""
    assert TwoTokenPolicy().expected_reward() == pytest.approx(2.1 / 9)
    assert train(advantage_term(advantage, {}), policy_term(objective, values)) > 0.8
