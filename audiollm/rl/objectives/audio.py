"""OPA-DPO: DPO with anchors and with a term that asks whether the answer comes from its recording.

Notation: w the chosen answer, l the rejected one, a the chosen answer once more with an altered recording (masked, or
another sample's); r = log policy(y) - log reference(y); s the logistic function; b = `beta`, delta = `anchor`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from audiollm.families.logprobs.answers import AnswerLogprobs, ItemLosses, Pairs
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.settings import OPADPOSettings
from audiollm.rl.objectives.terms import pair_metrics


def opa_dpo(
    answers: AnswerLogprobs, pairs: Pairs, settings: OPADPOSettings, figures: StepFigures
) -> ItemLosses:
    """On-policy alignment: three terms on an answer that corrects the policy's own.

    `-log s(b (r_w - r_l)) - conditional_weight log s(b (r_w - r_a)) + anchors`, the anchors being
    `-anchor_weight log s(b r_w - delta) - rejected_anchor_weight log s(delta - b r_l)
    - altered_anchor_weight log s(delta - b r_a)`, or squared distances with `anchor_loss: squared`. In r_a, policy
    and reference both hear the altered recording. Reads `altered_P`, unless its two weights are 0.

    Defaults: b 0.1, conditional 0.2, anchors 1, 1 and 0, delta 0. Sources: OPA-DPO, arXiv 2501.09695; mDPO,
    arXiv 2406.11839.
    """
    beta = settings.beta
    chosen_P, rejected_P = beta * answers.ratios_A[pairs.chosen_P], beta * answers.ratios_A[pairs.rejected_P]
    loss_P = -functional.logsigmoid(chosen_P - rejected_P)
    loss_P = loss_P + settings.anchor_weight * _anchor(chosen_P, settings, above=True)
    loss_P = loss_P + settings.rejected_anchor_weight * _anchor(rejected_P, settings, above=False)
    metrics = pair_metrics(answers, pairs, chosen_P, rejected_P)
    if settings.conditional_weight or settings.altered_anchor_weight:
        altered_P = beta * answers.ratios_A[_altered(pairs)]
        loss_P = loss_P - settings.conditional_weight * functional.logsigmoid(chosen_P - altered_P)
        loss_P = loss_P + settings.altered_anchor_weight * _anchor(altered_P, settings, above=False)
        metrics["conditional_margin"] = (chosen_P - altered_P).detach()
    return ItemLosses(loss_P, metrics)


def _anchor(reward_P: Tensor, settings: OPADPOSettings, above: bool) -> Tensor:
    distance_P = reward_P - settings.anchor
    if settings.anchor_loss == "squared":
        return distance_P.square()
    return -functional.logsigmoid(distance_P if above else -distance_P)


def _altered(pairs: Pairs) -> Tensor:
    if pairs.altered_P is None:
        raise ValueError("opa_dpo reads altered_P: the chosen answer with an altered recording")
    return pairs.altered_P
