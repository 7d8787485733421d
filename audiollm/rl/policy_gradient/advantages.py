"""Advantages by name, in two parts: what a call's own groups give, and what the moments of the whole step change.

```
raw = raw_advantages(term, rewards)             # on this rank's groups
moments = Moments.of(raw.measured_N)            # the training adds `moments.sums` over packs and ranks
advantage_T = scaled_advantages(term, raw, moments)
```

Shapes: T tokens of all answers of a call, A answers, G groups, F reward functions, S steps of reasoning. Everything is
without gradient. Deviations have Bessel's correction. A group whose rewards are all equal, or that has a single one,
has advantages of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import sum_by_index
from audiollm.recipe.plug_ins import Catalog, documented, import_of_class, is_import_path
from audiollm.rl.policy_gradient import settings as s
from audiollm.rl.policy_gradient.catalog import OWN_ADVANTAGE_REMEDY, AdvantageTerm, OwnAdvantage
from audiollm.rl.policy_gradient.moments import Moments, whitened
from audiollm.rl.policy_gradient.reward_shaping import group_range
from audiollm.rl.policy_gradient.rollout_batch import RolloutRewards, last_tokens, token_layout


@dataclass(frozen=True)
class RawAdvantages:
    """Advantages before the figures of the whole step."""

    advantage_T: Tensor
    """Advantage of each token; NaN where there is none."""
    kept_A: Tensor
    """bool: answers whose rewards are there; the others leave the loss."""
    measured_N: Tensor
    """Values whose moments `scaled_advantages` needs of the whole step; empty where it needs none."""
    return_T: Tensor | None = None
    """Target of the critic (GAE)."""


def raw_advantages(term: AdvantageTerm, rewards: RolloutRewards) -> RawAdvantages:
    """Compute the part of an advantage that needs this call's own groups alone.

    Raises:
        ValueError: a field of `term.reads` is None.
    """
    with torch.no_grad():
        return _advantage_function(term.name)(rewards, term.settings)


def scaled_advantages(term: AdvantageTerm, raw: RawAdvantages, moments: Moments) -> Tensor:
    """Return `[T]` advantages: `raw` divided by the step's deviation, whitened, or as it is; 0 where there is none.

    Args:
        moments: of `raw.measured_N`, added over all packs and ranks of the step.
    """
    settings, advantage_T = term.settings, raw.advantage_T
    if isinstance(settings, s.GRPOAdvantageSettings) and settings.scale == "batch":
        advantage_T = advantage_T / (moments.deviation + settings.epsilon).to(advantage_T)
        advantage_T = advantage_T if moments.deviation > 0 else torch.zeros_like(advantage_T)
    elif isinstance(settings, s.GDPOSettings) or (
        isinstance(settings, s.RLOOAdvantageSettings | s.WhitenedSettings) and settings.whiten
    ):
        advantage_T = whitened(advantage_T, moments, settings.epsilon)
    return advantage_T.nan_to_num(nan=0.0)


def grpo_advantages(rewards: RolloutRewards, settings: s.GRPOAdvantageSettings) -> RawAdvantages:
    """Group relative: `(r - mean of the group) / (deviation + epsilon)`, the same for all tokens of an answer.

    Moments, with `scale: batch`: of the step's rewards. Source: arXiv 2402.03300; `scale: none` is Dr. GRPO, arXiv
    2503.20783. Defaults are TRL's.
    """
    reward_A, group_A = rewards.required("reward_A"), rewards.required("group_A")
    advantage_A = _centred(reward_A, group_A, rewards.num_groups)
    if settings.scale == "group":
        advantage_A = _over_deviation(advantage_A, group_A, rewards.num_groups, settings.epsilon)
    scored_A = ~reward_A.isnan()
    measured_N = reward_A[scored_A] if settings.scale == "batch" else reward_A[:0]
    return RawAdvantages(advantage_A[rewards.answer_T], scored_A, measured_N)


def process_advantages(rewards: RolloutRewards, settings: s.GRPOAdvantageSettings) -> RawAdvantages:
    """GRPO with process supervision: the sum of the normalised rewards of the steps that end at or after a token.

    A step's reward is normalised among all steps of its group's answers, an outcome among the outcomes: a longer
    thought gains and loses nothing by its length. A missing reward of a step leaves the baseline and adds nothing; an
    answer without any leaves the loss. Moments, with `scale: batch`: of the step rewards, outcomes among them. Source:
    arXiv 2402.03300, section 4.1.3, which has steps alone.
    """
    step_reward_S, step_end_S = rewards.required("step_reward_S"), rewards.required("step_end_S")
    answer_S = rewards.answer_T[step_end_S]
    group_S, num_groups = rewards.required("group_A")[answer_S], rewards.num_groups
    if rewards.is_outcome_S is not None:
        group_S, num_groups = group_S + num_groups * rewards.is_outcome_S, 2 * num_groups
    normalized_S = _centred(step_reward_S, group_S, num_groups)
    if settings.scale == "group":
        normalized_S = _over_deviation(normalized_S, group_S, num_groups, settings.epsilon)
    at_end_T = sum_by_index(normalized_S.nan_to_num(nan=0.0), step_end_S, len(rewards.answer_T))
    scored_S = ~step_reward_S.isnan()
    kept_A = sum_by_index(scored_S.to(step_reward_S), answer_S, rewards.num_answers) > 0
    advantage_T = discounted_sums(at_end_T, rewards.answer_T, rewards.num_answers, 1.0)
    measured_N = step_reward_S[scored_S] if settings.scale == "batch" else step_reward_S[:0]
    return RawAdvantages(advantage_T.masked_fill(~kept_A[rewards.answer_T], torch.nan), kept_A, measured_N)


def gdpo_advantages(rewards: RolloutRewards, settings: s.GDPOSettings) -> RawAdvantages:
    """Normalise each reward function in its group, sum with weights, then whiten over the answers of the step.

    A function that gave no reward adds nothing to its answer. Moments: of the sums. Source: arXiv 2601.05242; TRL's
    `normalize_then_sum`.
    """
    reward_AF, group_A = rewards.required("reward_AF"), rewards.required("group_A")
    columns = [
        _over_deviation(
            _centred(reward_A, group_A, rewards.num_groups), group_A, rewards.num_groups, settings.epsilon
        )
        for reward_A in reward_AF.unbind(1)
    ]
    total_A = (torch.stack(columns, 1).nan_to_num(nan=0.0) * rewards.required("weight_F")).sum(1)
    scored_A = ~reward_AF.isnan().all(1)
    total_A = total_A.masked_fill(~scored_A, torch.nan)
    return RawAdvantages(total_A[rewards.answer_T], scored_A, total_A[scored_A])


def rloo_advantages(rewards: RolloutRewards, settings: s.RLOOAdvantageSettings) -> RawAdvantages:
    """REINFORCE leave-one-out: `r - mean of the other rewards of the group`.

    Moments, with `whiten`: of the advantages, one per answer. Source: arXiv 2402.14740.
    """
    reward_A, group_A = rewards.required("reward_A"), rewards.required("group_A")
    scored_A = ~reward_A.isnan()
    counts_A = sum_by_index(scored_A.to(reward_A), group_A, rewards.num_groups)[group_A]
    centred_A = _centred(reward_A, group_A, rewards.num_groups)
    advantage_A = centred_A * counts_A / (counts_A - 1).clamp(min=1)  # r - (sum - r) / (n - 1)
    has_others_A = scored_A & (counts_A > 1)
    advantage_A = advantage_A.masked_fill(~has_others_A, torch.nan)
    measured_N = advantage_A[has_others_A] if settings.whiten else advantage_A[:0]
    return RawAdvantages(advantage_A[rewards.answer_T], scored_A, measured_N)


def remax_advantages(rewards: RolloutRewards, settings: s.AdvantageSettings) -> RawAdvantages:
    """ReMax: `r - reward of the greedy answer to the same prompt`. Source: arXiv 2310.10505."""
    baseline_A = rewards.required("greedy_reward_G")[rewards.required("group_A")]
    advantage_A = rewards.required("reward_A") - baseline_A
    return RawAdvantages(advantage_A[rewards.answer_T], ~advantage_A.isnan(), advantage_A[:0])


def baseline_advantages(rewards: RolloutRewards, settings: s.WhitenedSettings) -> RawAdvantages:
    """REINFORCE++ with baseline: `r - mean of the group`, whitened over the tokens of the step.

    Moments, with `whiten`: of the tokens' advantages. Source: arXiv 2501.03262.
    """
    reward_A, group_A = rewards.required("reward_A"), rewards.required("group_A")
    advantage_T = _centred(reward_A, group_A, rewards.num_groups)[rewards.answer_T]
    return _to_be_whitened(advantage_T, ~reward_A.isnan(), settings)


def reinforce_advantages(rewards: RolloutRewards, settings: s.ReinforceSettings) -> RawAdvantages:
    """REINFORCE++: discounted sum of the rewards from each token on, whitened over the tokens of the step.

    `token_rewards` has the KL penalty of every token and the score at the last. With `level: step` the sum goes from
    step to step, and the tokens of a step share it. Source: arXiv 2501.03262.
    """
    reward_T, kept_A = _present_rewards(rewards)
    answer_T, count = rewards.answer_T, rewards.num_answers
    if settings.level == "step":
        action_T, answer_N = actions_of_tokens(rewards.required("step_end_S"), answer_T, count)
        reward_N = sum_by_index(reward_T, action_T, len(answer_N))
        advantage_T = discounted_sums(reward_N, answer_N, count, settings.gamma)[action_T]
    else:
        advantage_T = discounted_sums(reward_T, answer_T, count, settings.gamma)
    return _to_be_whitened(advantage_T.masked_fill(~kept_A[rewards.answer_T], torch.nan), kept_A, settings)


def gae_advantages(rewards: RolloutRewards, settings: s.GAESettings) -> RawAdvantages:
    """Generalised advantage estimation, whitened over the tokens of the step; `return_T` is not whitened.

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = sum (gamma lam)^i d_{t+i}`, with V = 0 after the last token;
    `return_t = A_t + V_t`. Sources: arXiv 1506.02438; gamma 1 and lambda 0.95 as in DeepSpeed-Chat (which does not
    whiten).
    """
    reward_T, kept_A = _present_rewards(rewards)
    value_T = rewards.required("value_T").detach()
    answer_T, count = rewards.answer_T, rewards.num_answers
    if settings.level == "step":
        actions = actions_of_tokens(rewards.required("step_end_S"), answer_T, count)
        credit = action_credit(reward_T, value_T, *actions, count, settings.gamma, settings.lam)
        advantage_T, return_T = credit.advantage_T, credit.return_T
    else:
        advantage_T = generalized_advantages(reward_T, value_T, answer_T, count, settings.gamma, settings.lam)
        return_T = advantage_T + value_T
    advantage_T = advantage_T.masked_fill(~kept_A[answer_T], torch.nan)
    raw = _to_be_whitened(advantage_T, kept_A, settings)
    return_T = return_T.masked_fill(~kept_A[answer_T], 0.0)
    return RawAdvantages(advantage_T, kept_A, raw.measured_N, return_T)


RAW_ADVANTAGES: dict[str, Callable[[RolloutRewards, Any], RawAdvantages]] = {
    "grpo": grpo_advantages,
    "dr_grpo": grpo_advantages,
    "grpo_process": process_advantages,
    "gdpo": gdpo_advantages,
    "rloo": rloo_advantages,
    "remax": remax_advantages,
    "reinforce_plus_plus": reinforce_advantages,
    "reinforce_plus_plus_baseline": baseline_advantages,
    "gae": gae_advantages,
}
"""The first part of every advantage; the keys are those of `catalog.ADVANTAGES`."""


def advantage_catalog() -> Catalog:
    """Advantages of policy gradients."""
    return Catalog(documented(RAW_ADVANTAGES), "Your own: `package.module:name` of an `OwnAdvantage`.")


def _advantage_function(name: str) -> Callable[[RolloutRewards, Any], RawAdvantages]:
    if is_import_path(name):
        return import_of_class(name, OwnAdvantage, OWN_ADVANTAGE_REMEDY).function
    return RAW_ADVANTAGES[name]


def _to_be_whitened(advantage_T: Tensor, kept_A: Tensor, settings: s.WhitenedSettings) -> RawAdvantages:
    measured_N = advantage_T[~advantage_T.isnan()] if settings.whiten else advantage_T[:0]
    return RawAdvantages(advantage_T, kept_A, measured_N)


def _present_rewards(rewards: RolloutRewards) -> tuple[Tensor, Tensor]:
    """Return the rewards per token with 0 for missing ones, and bool: the answers where none is missing."""
    reward_T = rewards.required("reward_T").detach()
    absent_T = reward_T.isnan()
    absent_A = sum_by_index(absent_T.to(reward_T), rewards.answer_T, rewards.num_answers)
    return torch.where(absent_T, 0.0, reward_T), absent_A == 0


def _centred(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """Return each reward minus the mean of its group; exactly 0 where all are equal, NaN where it is missing."""
    scored_N = ~reward_N.isnan()
    counts_G = sum_by_index(scored_N.to(reward_N), group_N, num_groups)
    sums_G = sum_by_index(reward_N.nan_to_num(nan=0.0), group_N, num_groups)
    centred_N = reward_N - (sums_G / counts_G.clamp(min=1))[group_N]
    low_G, high_G = group_range(reward_N, group_N, num_groups)
    return torch.where(scored_N & (low_G >= high_G)[group_N], 0.0, centred_N)


def _over_deviation(centred_N: Tensor, group_N: Tensor, num_groups: int, epsilon: float) -> Tensor:
    """Return centred rewards divided by the deviation of their group plus `epsilon`; 0 stays 0."""
    counts_G = sum_by_index((~centred_N.isnan()).to(centred_N), group_N, num_groups)
    squares_G = sum_by_index(centred_N.nan_to_num(nan=0.0).square(), group_N, num_groups)
    deviation_N = (squares_G / (counts_G - 1).clamp(min=1)).sqrt()[group_N]
    return torch.where(deviation_N > 0, centred_N / (deviation_N + epsilon), centred_N)


def discounted_sums(values_T: Tensor, answer_T: Tensor, num_answers: int, factor: float) -> Tensor:
    """Return `y_t = x_t + factor y_{t+1}` within each answer."""
    if not len(values_T):
        return values_T
    tokens = token_layout(answer_T, num_answers)
    padded_LA = values_T.new_zeros(int(tokens.position_E.max()) + 1, num_answers)
    padded_LA[tokens.position_E, tokens.item_E] = values_T[tokens.token_E]
    for place in range(len(padded_LA) - 2, -1, -1):
        padded_LA[place] += factor * padded_LA[place + 1]
    sums_T = torch.empty_like(values_T)
    sums_T[tokens.token_E] = padded_LA[tokens.position_E, tokens.item_E]
    return sums_T


def next_values(values_T: Tensor, answer_T: Tensor, num_answers: int) -> Tensor:
    """Return the value of the next token of the same answer; 0 after the last."""
    tokens = token_layout(answer_T, num_answers)
    values_E = values_T[tokens.token_E]
    next_E = torch.zeros_like(values_E)
    is_followed_E = tokens.item_E[1:] == tokens.item_E[:-1]
    next_E[:-1] = torch.where(is_followed_E, values_E[1:], 0.0)
    next_T = torch.empty_like(values_T)
    next_T[tokens.token_E] = next_E
    return next_T


def generalized_advantages(
    reward_T: Tensor, value_T: Tensor, answer_T: Tensor, num_answers: int, gamma: float, lam: float
) -> Tensor:
    """Return `A_t = sum over i of (gamma lam)^i (r_{t+i} + gamma V_{t+i+1} - V_{t+i})` (arXiv 1506.02438)."""
    error_T = reward_T + gamma * next_values(value_T, answer_T, num_answers) - value_T
    return discounted_sums(error_T, answer_T, num_answers, gamma * lam)


@dataclass(frozen=True)
class TokenCredit:
    """Advantage and return of every token."""

    advantage_T: Tensor
    return_T: Tensor


def action_credit(
    reward_T: Tensor,
    value_T: Tensor,
    action_T: Tensor,
    answer_N: Tensor,
    num_answers: int,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> TokenCredit:
    """Return the credit of tokens where an action is one step: its reward is the sum over its tokens.

    The value of an action is that before its first token. A discount counts actions, so a long action is no later than
    a short one.

    Args:
        reward_T: rewards at tokens, KL penalties included.
        action_T: int64: number of each token's action, ascending in the order of the tokens of an answer.
        answer_N: int64: the answer of each action.
    """
    num_actions = len(answer_N)
    reward_N = sum_by_index(reward_T, action_T, num_actions)
    place_T = torch.arange(len(action_T), device=action_T.device)
    first_N = place_T.new_full((num_actions,), len(action_T)).scatter_reduce(0, action_T, place_T, "amin")
    value_N = value_T[first_N]
    advantage_N = generalized_advantages(reward_N, value_N, answer_N, num_answers, gamma, lam)
    return TokenCredit(advantage_N[action_T], (advantage_N + value_N)[action_T])


def actions_of_tokens(end_S: Tensor, answer_T: Tensor, num_answers: int) -> tuple[Tensor, Tensor]:
    """Return int64 `[T]` the action of each token, and `[N]` the answer of each action, from the tokens that end
    actions.

    The last token of an answer ends its last action in any case.
    """
    tokens = token_layout(answer_T, num_answers)
    is_end_T = last_tokens(answer_T, num_answers)
    is_end_T[end_S] = True
    is_end_E = is_end_T[tokens.token_E]
    action_E = is_end_E.long().cumsum(0) - is_end_E.long()
    action_T = torch.empty_like(action_E)
    action_T[tokens.token_E] = action_E
    return action_T, tokens.item_E[is_end_E]
