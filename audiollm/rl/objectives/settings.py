"""Settings of every objective, with the defaults of its paper or of TRL 1.16. Loads no torch.

Where a docstring says "tuned", the paper gives a range and the default here is our choice within it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
SFTAverage = Literal["token", "sequence"]


class ObjectiveSettings(BaseModel):
    """Base of all objectives' settings. An objective without settings of its own takes this class."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ReferencedSettings(ObjectiveSettings):
    """Settings of an objective whose reward is `beta * log(policy / reference)`."""

    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference: higher values keep the policy closer to it."""


# ------------------------------------------------------------------------------------------------ pairs


class PairedSettings(ReferencedSettings):
    """Settings shared by the objectives on pairs with a reference."""

    ld_alpha: float | None = Field(None, ge=0, le=1)
    """Weight of the tokens beyond the length of the pair's shorter answer (LD-DPO); None or 1: all count alike."""
    ld_reference: bool = True
    """Apply `ld_alpha` to the reference too (LD-DPO's paper and TRL); False: to the policy alone (LLaMA-Factory)."""
    policy_weighting: bool = False
    """Weight each pair by the policy's own probability of its answers (WPO, arXiv 2406.11827). Needs
    `log_collision_T`."""


class DivergenceSettings(PairedSettings):
    """Settings of objectives on the difference of two scores, each f'(policy / reference) of an f-divergence."""

    f_divergence: Divergence = "reverse_kl"
    """Divergence from the reference (f-DPO, arXiv 2309.16240); `reverse_kl` is plain DPO."""
    f_alpha: float = 0.5
    """Coefficient of `alpha_divergence`; at 1 it is `reverse_kl`."""


class DPOSettings(DivergenceSettings):
    """Settings of `dpo`."""

    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """Share of pairs that are assumed to be labelled the wrong way round (conservative DPO)."""


class IPOSettings(DivergenceSettings):
    """Settings of `ipo`; `beta` is the paper's tau."""

    length: Literal["mean", "sum"] = "mean"
    """`mean` divides each log ratio by the answer's tokens (TRL, and the paper's authors); `sum` does not
    (OpenRLHF, and the paper's equation)."""


class EXOPairSettings(DivergenceSettings):
    """Settings of `exo_pair`."""

    label_smoothing: float = Field(1e-3, gt=0, lt=1)
    """Probability that the target distribution gives to the rejected answer."""


class RobustDPOSettings(DivergenceSettings):
    """Settings of `robust`."""

    label_smoothing: float = Field(0.1, ge=0, lt=0.5)
    """Probability that a label is flipped. TRL's default of 0 makes it `dpo`; the paper uses 0.1."""


class AOTSettings(PairedSettings):
    """Settings of `aot` and `aot_unpaired`."""

    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """As in `dpo`."""
    policy_weighting: Literal[False] = False
    """Not available: a comparison belongs to two pairs of different weight."""


class DiscoPOPSettings(DivergenceSettings):
    """Settings of `discopop`."""

    tau: float = Field(0.05, gt=0)
    """Temperature of the blend between the logistic and the exponential loss."""


class DPOPSettings(PairedSettings):
    """Settings of `dpop`, with the defaults of Smaug."""

    beta: float = Field(0.3, gt=0)
    """As in `dpo`."""
    penalty: float = Field(50.0, ge=0)
    """Weight, inside the sigmoid, of how far the chosen answer fell below the reference; 0: DPO."""


class BetaDPOSettings(PairedSettings):
    """Settings of `beta_dpo`; `beta` is the base value."""

    alpha: float = Field(0.6, ge=0)
    """Change of beta per unit of margin above the running mean; 0: DPO."""
    level: Literal["batch", "pair"] = "batch"
    """One beta per step from its mean margin (the paper's choice), or one per pair."""
    min_beta: float = Field(1e-3, gt=0)
    """Lower bound of the beta that is used."""


class SLiCSettings(ObjectiveSettings):
    """Settings of `slic_hf`."""

    margin: float = Field(1.0, ge=0)
    """Least difference of the log-probabilities (delta)."""
    sft_weight: float = Field(0.5, ge=0)
    """Weight of the cross entropy on the chosen answer (lambda); tuned."""
    sft_average: SFTAverage = "token"
    """Average of the cross entropy: over the step's tokens, or over answers."""


class TDPOSettings(ReferencedSettings):
    """Settings of `tdpo1`."""


class TDPO2Settings(ReferencedSettings):
    """Settings of `tdpo2`."""

    alpha: float = Field(0.5, ge=0)
    """Weight of the difference of the sequential KLs; 0: DPO."""


class CringeSettings(ObjectiveSettings):
    """Settings of `cringe`."""

    weight: float = Field(1.0, ge=0)
    """Weight of the contrast on the rejected answer (the paper's alpha); tuned."""
    gate_temperature: float | None = Field(None, gt=0)
    """Temperature of the pairwise gate; None: no gate (plain CRINGE)."""
    gate_bias: float = 0.0
    """Margin of the summed log-probabilities at which the gate is half open (b); tuned."""


# ----------------------------------------------------------------------------------------------- length


class RDPOSettings(DPOSettings):
    """Settings of `r_dpo`."""

    alpha: float = 0.01
    """Penalty per token of length difference, added inside the sigmoid; 0: DPO. Tuned from 0.005 to 0.05."""


class SamPOSettings(ReferencedSettings):
    """Settings of `sampo`."""


class LDDPOSettings(DPOSettings):
    """Settings of `ld_dpo`: those of `dpo`, with a default for `ld_alpha`."""

    ld_alpha: float | None = Field(0.5, ge=0, le=1)
    """Weight of the tokens beyond the length of the pair's shorter answer; 1: DPO. Tuned per model."""


# ---------------------------------------------------------------------------------- without a reference


class UnreferencedSettings(ObjectiveSettings):
    """Settings shared by `cpo` and `simpo`."""

    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """As in `dpo`; read by the sigmoid losses."""
    alpha: float = 0.0
    """AlphaPO's shape of the reward, `(1 - p^-alpha) / alpha` (arXiv 2501.03884); 0: log p."""
    sft_average: SFTAverage = "token"
    """Average of the cross entropy: over the step's tokens (TRL), or over answers."""


class SimPOSettings(UnreferencedSettings):
    """Settings of `simpo`."""

    beta: float = Field(2.0, gt=0)
    """Scale of the mean log-probability per token; the paper uses 2.0 to 2.5 (TRL's default is 0.1)."""
    gamma: float = 0.5
    """Target margin of the scaled rewards (TRL's `simpo_gamma`); the paper tunes it from 0.3 to 1.6."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of the cross entropy on the chosen answer (CPO-SimPO); the paper has none."""


class CPOSettings(UnreferencedSettings):
    """Settings of `cpo`."""

    beta: float = Field(0.1, gt=0)
    """Scale of the log-probabilities."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """`ipo` takes the mean log-probability per token, the others the sum, as TRL does."""
    sft_weight: float = Field(1.0, ge=0)
    """Weight of the cross entropy on the chosen answer (TRL's `cpo_alpha`)."""


class ORPOSettings(ObjectiveSettings):
    """Settings of `orpo`."""

    beta: float = Field(0.1, ge=0)
    """Weight of the log odds ratio (the paper's lambda)."""
    sft_on: Literal["answer", "prompt_and_answer"] = "answer"
    """Tokens of the cross entropy: the chosen answer (the paper), or its prompt too (TRL). The latter needs
    `prompt_sum_A` and `prompt_length_A`."""
    sft_average: SFTAverage = "token"
    """Average of the cross entropy: over the step's tokens (TRL), or over answers."""


# ---------------------------------------------------------------------------------------------- singles


class KTOSettings(ReferencedSettings):
    """Settings of `kto`."""

    desirable_weight: float = Field(1.0, ge=0)
    """Weight of the desirable answers. Paper: their count times this within 1 to 4/3 of the other side's."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of the undesirable answers."""


class NPOSettings(ReferencedSettings):
    """Settings of `npo`."""

    retain_weight: float = Field(1.0, ge=0)
    """Weight of the cross entropy on the desirable answers; 0: they count for nothing."""
    sft_average: SFTAverage = "token"
    """Average of that cross entropy: over the step's tokens, or over answers."""


class DROSettings(ObjectiveSettings):
    """Settings of `dro`."""

    tau: float = Field(1.0, gt=0)
    """Weight of the log ratio to the reference."""


# ------------------------------------------------------------------------------------- lists and games


class LiPOSettings(ReferencedSettings):
    """Settings of `lipo_lambda`."""

    beta: float = Field(0.05, gt=0)
    """As in `dpo`; tuned."""


class PROSettings(ObjectiveSettings):
    """Settings of `pro`."""

    dynamic_temperature: bool = True
    """Scale each comparison by the difference of the two scores; False: by 1."""
    sft_weight: float = Field(0.05, ge=0)
    """Weight of the cross entropy on the best answer, times (length of the list - 1) squared."""


class RRHFSettings(ObjectiveSettings):
    """Settings of `rrhf`."""

    sft_weight: float = Field(1.0, ge=0)
    """Weight of the cross entropy on the best answer."""
    sft_average: SFTAverage = "sequence"
    """Average of that cross entropy: over the step's tokens, or over answers."""


class D2OSettings(ReferencedSettings):
    """Settings of `d2o`; `beta` scales the samples."""

    alpha: float = Field(0.1, gt=0)
    """Scale of the negative's log ratio; tuned."""


class SPPOSettings(ReferencedSettings):
    """Settings of `sppo_soft`; `1 / beta` is the paper's eta."""

    beta: float = Field(1e-3, gt=0)
    """Inverse of the step size eta: the paper takes eta = 1000. (TRL's default for `sppo_hard` is 0.1.)"""


# ---------------------------------------------------------------------------- reward models, SFT, audio


class BradleyTerrySettings(ObjectiveSettings):
    """Settings of `bradley_terry`."""

    centering: float = Field(0.0, ge=0)
    """Weight of the squared sum of both scores, which centres them on 0 (arXiv 2312.09244); TRL suggests 0.01."""


class SFTSettings(ObjectiveSettings):
    """Settings of `sft`."""

    average: SFTAverage = "token"
    """Average over the step's tokens (TRL), or over the means of its answers."""


class OPADPOSettings(ReferencedSettings):
    """Settings of `opa_dpo`, with the weights that OPA-DPO was trained with. A conditional weight of 1 and a rejected
    anchor's of 0 make it mDPO (arXiv 2406.11839)."""

    conditional_weight: float = Field(0.2, ge=0)
    """Weight of the term that prefers the answer with its recording to the same with an altered recording."""
    anchor_weight: float = Field(1.0, ge=0)
    """Weight of the anchor that holds the chosen answer's reward above `anchor`."""
    rejected_anchor_weight: float = Field(1.0, ge=0)
    """Weight of the anchor that holds the rejected answer's reward below `anchor`."""
    altered_anchor_weight: float = Field(0.0, ge=0)
    """Weight of the anchor that holds the reward with the altered recording below `anchor`."""
    anchor: float = 0.0
    """Reward at which the anchors hold (delta)."""
    anchor_loss: Literal["sigmoid", "squared"] = "sigmoid"
    """`sigmoid`: -log sigmoid(reward - anchor); `squared`: (reward - anchor)^2."""
