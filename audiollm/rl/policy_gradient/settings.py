"""Settings of advantages, policy objectives, KL and corrections, with their sources' defaults. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from audiollm.rl.objectives.settings import ObjectiveSettings

RewardScale = Literal["group", "batch", "none"]
Average = Literal["token", "answer", "answer_sum", "fixed"]
RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
Estimator = Literal["k1", "k2", "k3"]
KLGradient = Literal["plain", "ratio_corrected", "k2"]

# ------------------------------------------------------------------------------------------- advantages


class AdvantageSettings(ObjectiveSettings):
    """Base of all advantages' settings. An advantage without settings of its own takes this class."""


class GRPOAdvantageSettings(AdvantageSettings):
    """Settings of `grpo`."""

    scale: RewardScale = "group"
    """Standard deviation that divides the centred rewards: of the group, of the whole step (`batch`), or none."""
    epsilon: float = Field(1e-4, ge=0)
    """Added to the standard deviation. TRL has 1e-4, verl 1e-6, OpenRLHF 1e-9."""


class ProcessAdvantageSettings(GRPOAdvantageSettings):
    """Settings of `grpo_process`."""

    outcome: bool = True
    """The rewards of the whole answer are the reward of its last step, which ends with the answer; False: they have no
    part in the advantage."""


class DrGRPOAdvantageSettings(GRPOAdvantageSettings):
    """Settings of `dr_grpo`: those of `grpo`, without a division."""

    scale: RewardScale = "none"
    """As in `grpo`; the paper divides by nothing."""


class GDPOSettings(AdvantageSettings):
    """Settings of `gdpo`."""

    epsilon: float = Field(1e-4, ge=0)
    """Added to both standard deviations: of a function in a group, and of the sums in the step."""


class RLOOAdvantageSettings(AdvantageSettings):
    """Settings of `rloo`."""

    whiten: bool = False
    """Bring the advantages of the step to mean 0 and deviation 1 (TRL's `normalize_advantages`)."""
    epsilon: float = Field(1e-4, ge=0)
    """Added to the standard deviation when whitening."""


class WhitenedSettings(AdvantageSettings):
    """Settings of `reinforce_plus_plus_baseline`."""

    whiten: bool = True
    """Bring the advantages of all tokens of the step to mean 0 and deviation 1."""
    epsilon: float = Field(1e-8, ge=0)
    """Added to the standard deviation when whitening."""


class ReinforceSettings(WhitenedSettings):
    """Settings of `reinforce_plus_plus`."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    steps: bool = False
    """The reward of a step stands at the token that ends the step; False: the mean over the steps counts at the end of
    the answer."""
    score_clip: float | None = Field(None, gt=0)
    """Rewards of answers are cut to this on both sides, before the KL is subtracted (DeepSpeed-Chat: 5); None: not."""
    level: Literal["token", "step"] = "token"
    """`step`: a step of an answer is one action, whose tokens share its advantage (with a critic: the value is that
    before its first token), and a discount counts steps. Needs `steps`."""

    @model_validator(mode="after")
    def _check_steps(self) -> ReinforceSettings:
        if self.steps and self.score_clip is not None:
            raise ValueError("score_clip cuts rewards of whole answers, and steps is set: leave one out")
        if self.level == "step" and not self.steps:
            raise ValueError("level: step goes from step to step, and steps is not set: set steps: true")
        return self


class GAESettings(ReinforceSettings):
    """Settings of `gae`."""

    lam: float = Field(0.95, ge=0, le=1)
    """Weight of longer returns: 0 is the error of one token, 1 the whole return minus the value."""


# ---------------------------------------------------------------------------------------------- policies


class PolicyObjectiveSettings(ObjectiveSettings):
    """Base of the policy objectives' settings."""

    average: Average = "token"
    """Average over the step: `token`: over its tokens; `answer`: over answers of the mean of their tokens;
    `answer_sum`: over answers of the sum of their tokens; `fixed`: sum over tokens / (answers x a constant), which is
    `max_answer_tokens`, or where answers are speech alone `max_frames`."""


class ClipSettings(PolicyObjectiveSettings):
    """Settings of `clip` and of all objectives that are special cases of it."""

    epsilon_low: float = Field(0.2, ge=0)
    """The ratio is clipped below at `1 - epsilon_low`."""
    epsilon_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at `1 + epsilon_high`."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest loss of a token with a negative advantage, in units of -advantage (dual clip; verl takes 3)."""
    max_ratio: float | None = Field(None, gt=1)
    """Upper bound of the ratio that is not clipped (TRL's `delta`, two-sided clipping)."""
    level: RatioLevel = "token"
    """Ratio of policy to old: of each `token`; of the `sequence`, as the exponential of its mean log ratio (GSPO);
    the same with each token's own gradient (`sequence_token`); or of the sequence as a `product` (RLOO)."""

    @model_validator(mode="after")
    def _check_max_ratio(self) -> ClipSettings:
        if self.max_ratio is not None and self.max_ratio <= 1 + self.epsilon_high:
            raise ValueError("max_ratio must be above 1 + epsilon_high")
        return self


class GRPOLossSettings(ClipSettings):
    """Settings of `grpo`."""

    average: Average = "answer"
    """As in `clip`; the paper gives every answer the same weight."""


class DAPOSettings(ClipSettings):
    """Settings of `dapo`."""

    epsilon_high: float = Field(0.28, ge=0)
    """As in `clip`; above `epsilon_low`, so that unlikely tokens can become likely (clip-higher)."""


class DrGRPOLossSettings(ClipSettings):
    """Settings of `dr_grpo`."""

    average: Average = "fixed"
    """As in `clip`; the paper divides by a constant, so that long answers are not favoured when wrong."""


class GSPOSettings(GRPOLossSettings):
    """Settings of `gspo`."""

    epsilon_low: float = Field(3e-4, ge=0)
    """As in `clip`; ratios of sequences are closer to 1 than those of tokens."""
    epsilon_high: float = Field(4e-4, ge=0)
    """As in `clip`."""
    level: RatioLevel = "sequence"
    """As in `clip`."""


class GSPOTokenSettings(GSPOSettings):
    """Settings of `gspo_token`."""

    level: RatioLevel = "sequence_token"
    """As in `clip`."""


class LUSPOSettings(ClipSettings):
    """Settings of `luspo`."""

    average: Average = "answer_sum"
    """As in `clip`; an answer's loss is multiplied by its length."""
    level: RatioLevel = "sequence"
    """As in `clip`."""


class RLOOLossSettings(ClipSettings):
    """Settings of `rloo`."""

    average: Average = "answer"
    """As in `clip`; all tokens of an answer have the same loss."""
    level: RatioLevel = "product"
    """As in `clip`."""


class CISPOSettings(PolicyObjectiveSettings):
    """Settings of `cispo`."""

    max_ratio: float = Field(5.0, gt=0)
    """Upper bound of the ratio, which is a constant factor (TRL's `epsilon_high`)."""


class SAPOSettings(PolicyObjectiveSettings):
    """Settings of `sapo`."""

    average: Average = "answer"
    """As in `clip`."""
    temperature_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    temperature_negative: float = Field(1.05, gt=0)
    """Steepness of the gate for the other advantages."""


class VESPOSettings(PolicyObjectiveSettings):
    """Settings of `vespo`."""

    k_positive: float = Field(2.0, ge=0)
    """Power of the ratio for advantages of at least 0."""
    lambda_positive: float = Field(3.0, ge=1e-4)
    """Decay with the ratio for advantages of at least 0."""
    k_negative: float = Field(3.0, ge=0)
    """Power of the ratio for negative advantages."""
    lambda_negative: float = Field(2.0, ge=1e-4)
    """Decay with the ratio for negative advantages."""


class ValueLossSettings(ObjectiveSettings):
    """Settings of the critic's loss."""

    clip: float | None = Field(0.2, gt=0)
    """Largest distance of the value from that before the updates; None: no clipping."""


# --------------------------------------------------------------------------------------------------- KL


class KLSettings(ObjectiveSettings):
    """Estimate of KL(policy || reference) at the sampled tokens."""

    estimator: Estimator = "k3"
    """With d = log policy - log reference: `k1` d; `k2` d^2 / 2; `k3` exp(-d) - 1 + d."""
    gradient: KLGradient = "ratio_corrected"
    """In the loss: `plain` differentiates the estimate; `ratio_corrected` multiplies it by policy / old, with
    gradient (TRL 1.16's default); `k2` has the estimate's value and k2's gradient (verl's `+`)."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of every token's loss; `reward`: subtracted from the rewards, without gradient."""


class FixedKLSettings(ObjectiveSettings):
    """Settings of `fixed`."""

    coefficient: float = Field(0.01, ge=0)
    """Weight of the KL, at the start."""


class AdaptiveKLSettings(FixedKLSettings):
    """Settings that the adaptive controllers share."""

    coefficient: float = Field(0.2, gt=0)
    """Weight of the KL, at the start."""
    target: float = Field(6.0, gt=0)
    """KL to hold, in nats, in the unit that the training measures it in (per answer or per token)."""
    max_error: float = Field(0.2, gt=0)
    """Relative errors are cut to this on both sides."""


class ProportionalKLSettings(AdaptiveKLSettings):
    """Settings of `proportional` and `exponential`."""

    gain: float = Field(0.1, gt=0, lt=5)
    """Change of the coefficient per unit of relative error and step (K_beta)."""


class HorizonKLSettings(AdaptiveKLSettings):
    """Settings of `horizon`."""

    horizon: float = Field(10_000.0, gt=0)
    """Answers after which an error of 1 has changed the coefficient by its own size."""


# ------------------------------------------------------------------------------------------- corrections


class CorrectionSettings(ObjectiveSettings):
    """Importance weights for the mismatch between the engine that sampled (behaviour) and the training (old)."""

    level: Literal["token", "sequence"] = "sequence"
    """Weight of each token, or the product over the answer for all of its tokens."""
    mode: Literal["truncate", "mask"] = "mask"
    """`truncate` cuts weights to the bounds; `mask` drops what is outside, from the denominators too."""
    cap: float | None = Field(3.0, gt=0)
    """Upper bound of the weights; None: none. With both bounds None the weights are exact, and noisy."""
    floor: float | None = Field(None, ge=0)
    """Lower bound of the weights; None: none."""

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionSettings:
        if self.cap is not None and self.floor is not None and self.floor >= self.cap:
            raise ValueError("floor must be below cap")
        return self


class TokenRewardSettings(ObjectiveSettings):
    """Rewards per token from scores per answer, with the values of DeepSpeed-Chat."""

    score_clip: float | None = Field(5.0, gt=0)
    """Scores are cut to this on both sides; None: not at all."""
