"""Packs of answers before the updates on them: advantages, importance weights, counts, entropies, and the mismatch.

Every sum over the step is over all packs and ranks before anything is divided by it.

Shapes: T tokens of a pack, flat; A answers of a pack; G groups of it; F reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from audiollm.families.logprobs.answers import AnswerLogprobs, sum_by_index
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.fresh_losses import CriticTargets, FreshAnswers
from audiollm.rl.online.rollout_packs import RolloutPack
from audiollm.rl.online.settings import PolicyTrainingConfig
from audiollm.rl.online.steps import placed_steps
from audiollm.rl.policy_gradient.advantages import RawAdvantages, raw_advantages, scaled_advantages
from audiollm.rl.policy_gradient.corrections import ImportanceWeights, MismatchFigures, importance_weights
from audiollm.rl.policy_gradient.kl import kl_estimates
from audiollm.rl.policy_gradient.losses import StepCounts, entropy_threshold
from audiollm.rl.policy_gradient.moments import Moments
from audiollm.rl.policy_gradient.reward_shaping import penalized_rewards, token_rewards
from audiollm.rl.policy_gradient.rollout_batch import RolloutRewards
from audiollm.rl.policy_gradient.settings import CorrectionSettings, ReinforceSettings, TokenRewardSettings

MEASURED_ONLY = CorrectionSettings(level="token", mode="truncate", cap=None)
"""Weights that are looked at and not used: the mismatch is told in every run."""


@dataclass(frozen=True)
class ScoredPack:
    """A pack with what stays the same over the updates of a step."""

    pack: RolloutPack
    answer_T: Tensor
    old_T: Tensor
    reference_T: Tensor | None
    kept_T: Tensor
    correction: ImportanceWeights
    advantage_T: Tensor
    entropy_T: Tensor
    values: CriticTargets | None
    """What the critic is trained on; None: there is no critic."""


class AdvantageMaker:
    """Makes advantages and importance weights from the pass over a step's packs before the updates.

    Args:
        kl_weight: gives the weight of the KL in the reward now: of all tokens, or `[T]` by which of them are codes.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        ranks: Ranks,
        kl_weight: Callable[[Tensor | None], float | Tensor],
    ) -> None:
        self._config, self._ranks, self._kl_weight = config, ranks, kl_weight
        self._advantage, self._kl = config.advantage_term, config.kl
        self._weight_F = torch.tensor([term.weight for term in config.reward_terms], dtype=torch.float64)

    def __call__(
        self, packs: Sequence[RolloutPack], first: Sequence[AnswerLogprobs]
    ) -> tuple[list[ScoredPack], dict[str, float | Tensor]]:
        """Return the packs with their advantages and weights, and the figures of the mismatch.

        Args:
            first: log-probabilities of each pack before the updates, without gradient.
        """
        raws = [self._raw(pack, answers) for pack, answers in zip(packs, first, strict=True)]
        moments = Moments(self._ranks.sum(sum_of([Moments.of(raw.measured_N).sums for raw in raws])))
        scored, mismatch = [], []
        for pack, answers, raw in zip(packs, first, raws, strict=True):
            kept_A = raw.kept_A
            if self._config.truncated == "leave_out":
                kept_A = kept_A & ~pack.truncated_A
            answer_T = answers.answer_T.cpu()
            kept_T = kept_A[answer_T]
            old_T, behaviour_T = answers.policy_T.cpu(), _to_batch_order(pack.behaviour_T, answer_T)
            settings = self._config.correction or MEASURED_ONLY
            weights = importance_weights(behaviour_T, old_T, answer_T, len(pack.places), settings, kept_T)
            mismatch.append(weights.figures)
            advantage_T = scaled_advantages(self._advantage, raw, moments).to(old_T)
            if self._config.codebooks is not None:
                assert answers.codebook_T is not None  # the policy speaks
                is_fine_T = answers.codebook_T.cpu() >= self._config.codebooks
                advantage_T = advantage_T.masked_fill(is_fine_T, 0.0)
            reference_T = None if answers.reference_T is None else answers.reference_T.cpu()
            assert answers.entropy_T is not None
            entropy_T = answers.entropy_T.cpu()
            values = None
            if answers.value_T is not None and raw.return_T is not None:
                values = CriticTargets(answers.value_T.cpu(), raw.return_T.to(old_T))
            scored.append(
                ScoredPack(
                    pack, answer_T, old_T, reference_T, kept_T, weights, advantage_T, entropy_T, values
                )
            )
        total = sum(mismatch[1:], mismatch[0])
        largest = max(self._ranks.gather(float(total.largest_log_ratio)))
        every = MismatchFigures(self._ranks.sum(total.sums), torch.tensor(largest, dtype=torch.float64))
        return scored, dict(every.values())

    def _raw(self, pack: RolloutPack, answers: AnswerLogprobs) -> RawAdvantages:
        """The advantages of a pack's own groups, from rewards with the KL in them where it is asked for."""
        answer_T, count = answers.answer_T.cpu(), len(pack.places)
        kl_T = None
        if self._kl is not None and self._kl.place == "reward":
            assert answers.reference_T is not None
            kl_T = kl_estimates(answers.policy_T, answers.reference_T, self._kl.estimator).cpu().double()
            kl_T = kl_T * self._kl_weight(None if answers.is_code_T is None else answers.is_code_T.cpu())
        reward_A = pack.reward_A
        reads = self._advantage.reads
        reward_T = None
        step_S = end_S = is_outcome_S = None
        if self._config.reads_steps:
            step_S, end_S, is_outcome_S = placed_steps(pack.steps, answer_T, count)
        if "reward_T" in reads:
            assert isinstance(self._advantage.settings, ReinforceSettings)  # GAE's are, too
            settings = TokenRewardSettings(score_clip=self._advantage.settings.score_clip)
            score_A = reward_A if step_S is None else 0 * reward_A
            reward_T = token_rewards(score_A, kl_T, answer_T, 1.0, settings)
            if step_S is not None and end_S is not None:
                reward_T = reward_T + sum_by_index(step_S, end_S, len(answer_T))
        elif kl_T is not None:
            reward_A = penalized_rewards(reward_A, kl_T, answer_T, 1.0)
        value_T = None if answers.value_T is None else answers.value_T.cpu().double()
        rewards = RolloutRewards(
            answer_T, count, pack.group_A, pack.num_groups, reward_A, pack.reward_AF,
            self._weight_F, pack.greedy_reward_G, reward_T, value_T, step_S, end_S,
            is_outcome_S,
        )  # fmt: skip
        return raw_advantages(self._advantage, rewards)


def fresh_answers(scored_pack: ScoredPack) -> FreshAnswers:
    """Return the answers of a pack as losses take them; those that are not kept have no reward."""
    count = len(scored_pack.pack.places)
    kept_A = torch.bincount(scored_pack.answer_T[scored_pack.kept_T], minlength=count) > 0
    return FreshAnswers(
        AnswerLogprobs(scored_pack.old_T, scored_pack.answer_T, count, scored_pack.reference_T),
        scored_pack.pack.reward_A.masked_fill(~kept_A, torch.nan),
        scored_pack.pack.group_A,
        scored_pack.advantage_T.masked_fill(~scored_pack.kept_T, 0.0),
    )


def counted_tokens(scored_pack: ScoredPack, correction: CorrectionSettings | None) -> Tensor:
    """Return bool `[T]`: tokens that count: kept, and not masked by the correction."""
    return scored_pack.kept_T & scored_pack.correction.kept_T if correction else scored_pack.kept_T


def counted_entropies(scored: Sequence[ScoredPack], correction: CorrectionSettings | None) -> list[Tensor]:
    """Return the entropies of the tokens that count, of each pack."""
    return [scored_pack.entropy_T[counted_tokens(scored_pack, correction)] for scored_pack in scored]


def step_counts(scored: Sequence[ScoredPack], config: PolicyTrainingConfig, ranks: Ranks) -> StepCounts:
    """Count the tokens and answers of a whole step. Called on every rank."""
    threshold = None
    if config.top_entropy < 1:
        threshold = step_threshold(counted_entropies(scored, config.correction), config.top_entropy, ranks)
    parts = [
        StepCounts.of(
            counted_tokens(scored_pack, config.correction),
            scored_pack.answer_T,
            len(scored_pack.pack.places),
            None,
            scored_pack.entropy_T,
            threshold,
        ).sums
        for scored_pack in scored
    ]
    max_length = config.max_frames if config.answer == "audio" else config.max_answer_tokens
    return StepCounts(ranks.sum(sum_of(parts)), max_length, threshold)


def mean_entropy(packs: Sequence[Tensor], ranks: Ranks) -> float:
    """Return the mean entropy per token of the step; 0 without tokens. Called on every rank.

    Args:
        packs: entropies `[T]` of the tokens that count, pack by pack.
    """
    entropy_T = torch.cat([pack_T.double() for pack_T in packs])
    sums = ranks.sum(torch.stack([entropy_T.sum(), entropy_T.new_tensor(float(len(entropy_T)))]))
    return float(sums[0] / sums[1].clamp(min=1))


def step_threshold(packs: Sequence[Tensor], share: float, ranks: Ranks) -> Tensor:
    """Return the entropy above which the given share of the step's tokens lies. Called on every rank.

    It lies halfway between the lowest entropy above and the highest below, so that a token is on the same side of it
    whatever pack it is computed in: its entropy differs there by rounding.

    Args:
        packs: entropies `[T]` of the tokens that count, pack by pack.
        share: share of the tokens, in (0, 1].
    """
    local_values = [value for pack_T in packs for value in pack_T.double().tolist()]
    every = torch.tensor(
        [value for rank_values in ranks.gather(local_values) for value in rank_values], dtype=torch.float64
    )
    threshold = entropy_threshold(every, share)
    above_N, below_N = every[every >= threshold], every[every < threshold]
    return (above_N.min() + below_N.max()) / 2 if len(below_N) else torch.zeros_like(threshold)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(list(parts)).sum(0)


def _to_batch_order(values_T: Tensor, answer_T: Tensor) -> Tensor:
    """Put values that stand answer after answer where the tokens of a batch are, which may be interleaved.

    Raises:
        ValueError: there are not as many values as tokens: what was sampled is not what is trained on.
    """
    if len(values_T) != len(answer_T):
        raise ValueError(f"{len(values_T)} sampled tokens, and {len(answer_T)} in the batch")
    ordered_T = torch.empty_like(values_T)
    ordered_T[torch.argsort(answer_T, stable=True)] = values_T
    return ordered_T
