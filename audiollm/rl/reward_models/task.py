"""Training of a reward model on groups of answers: a `Task` of the training loop; is its confidence right?

Shapes: A answers, P pairs, L entries of lists, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.families.logprobs.answers import (
    AnswerGroups,
    AnswerScores,
    ItemLosses,
    LabelledSteps,
    Lists,
    Pairs,
    StepScores,
)
from audiollm.files.atomic import write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.preference.batches import MicroBatch, StepMaker
from audiollm.rl.preference.held_out import WorstItems
from audiollm.rl.preference.task import MetricSums, PreferenceParts, PreferenceTask
from audiollm.rl.reward_models.model import RewardModel


class RewardTask(PreferenceTask):
    """As `PreferenceTask`, with scores in place of log-probabilities; its loss is as exact.

    Args:
        margin_scale: factor on the margins of pairs; 0: none.
        folder: where every evaluation writes `pairs.jsonl` and `reliability.json`; None: nowhere.
    """

    def __init__(
        self,
        model: RewardModel,
        steps: StepMaker[Any, Any, Any],
        terms: Sequence[ObjectiveTerm],
        set_aside: SetAside,
        ranks: Ranks = ALONE,
        margin_scale: float = 0.0,
        folder: Path | None = None,
    ) -> None:
        super().__init__(PreferenceParts(model.policy, steps, terms, set_aside, ranks, folder))
        self._model, self._margin_scale = model, margin_scale
        self._root: nn.Module = model.root

    def modules(self) -> dict[str, nn.Module]:
        return {"reward": self._model.root}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        self._root = modules["reward"]

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["reward"]}

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}

    @torch.no_grad()
    def evaluate(self, step: int) -> Mapping[str, float]:
        """Means over the held-out items, and the calibration error of the probability that an answer is better.

        Also writes the pairs that are ordered worst, and the reliability where answers are compared or steps labelled.
        """
        sums, worst, decisions = MetricSums(), WorstItems(), []
        for batch in self._steps.held_out():
            self._set_aside.add(batch.bad)
            for micro_batch in self._evened(batch.micro):
                scores, groups = self._scored(micro_batch)
                item_losses = mixed_losses(self._terms, scores, groups, StepFigures())
                sums.add({"loss": item_losses.loss_I, **item_losses.metrics})
                worst.add(micro_batch, item_losses.metrics)
                decisions += list(zip(*map(Tensor.tolist, decisions_of(scores, groups)), strict=True))
        every = [decision for row in self._ranks.gather(decisions) for decision in row]
        figures = sums.means(self._ranks)
        if self._folder is not None:
            worst.write(self._folder / "pairs.jsonl", self._steps, step, self._ranks)
        if every:
            logits, labels = zip(*every, strict=True)
            reliability = reliability_of(logits, labels)
            figures["calibration_error"] = reliability.error
            if self._folder is not None and self._ranks.first:
                write_json(self._folder / "reliability.json", asdict(reliability))
        return figures

    def _losses(self, micro: MicroBatch[Any], figures: StepFigures, with_kl: bool = False) -> ItemLosses:
        return mixed_losses(self._terms, *self._scored(micro), figures)

    def _scored(self, micro: MicroBatch[Any]) -> tuple[AnswerScores | StepScores, AnswerGroups]:
        on_device_batch = micro.to(self.device)
        groups = on_device_batch.groups
        if isinstance(groups, Pairs) and groups.margin_P is not None:
            margin_P = self._margin_scale * groups.margin_P if self._margin_scale else None
            groups = replace(groups, margin_P=margin_P)
        return self._model.scores(self._root, on_device_batch.batch), groups


def decisions_of(scores: AnswerScores | StepScores, groups: AnswerGroups) -> tuple[Tensor, Tensor]:
    """Return the logit of each decision, and the probability that what it says is true.

    Decisions are between the answers of a pair, between every two answers of a list that were judged unequal, and
    on each step; there are none on single answers.
    """
    if isinstance(scores, StepScores):
        assert isinstance(groups, LabelledSteps)
        return scores.score_S, groups.label_S
    logit_P = scores.score_A[:0]
    if isinstance(groups, Pairs):
        logit_P = scores.score_A[groups.chosen_P] - scores.score_A[groups.rejected_P]
    if isinstance(groups, Lists):
        better, worse = groups.better_LL.nonzero(as_tuple=True)
        logit_P = scores.score_A[groups.answer_L[better]] - scores.score_A[groups.answer_L[worse]]
    return logit_P, torch.ones_like(logit_P)


BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Decisions (pairs of answers, or steps) of about the same confidence."""

    confidence: float
    """Mean probability given to what the model decided, 0.5 to 1."""
    accuracy: float
    """Share of right decisions."""
    count: int


@dataclass(frozen=True)
class Reliability:
    """Bins that hold decisions, the least confident first."""

    bins: list[ReliabilityBin]
    error: float
    """Expected calibration error: mean distance of accuracy and confidence, weighted by the bins' counts."""


def reliability_of(
    logits: Sequence[float], labels: Sequence[float] | None = None, bins: int = BINS
) -> Reliability:
    """Compare confidence with accuracy, in bins of equal width between 0.5 and 1.

    The probability that an answer is better than another is the `sigmoid` of the difference of their scores (Bradley
    and Terry 1952); that of a right step is the `sigmoid` of its score.

    Args:
        logits: score of the chosen answer minus that of the rejected one, of each pair; or the score of each step.
        labels: probability that what the logit is of is true, of each; None: 1.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), equation 3.
    """
    sorted_in: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for logit, label in zip(logits, labels or [1.0] * len(logits), strict=True):
        confidence = 1 / (1 + math.exp(-min(abs(logit), 700.0)))
        right = 0.5 if logit == 0 else label if logit > 0 else 1.0 - label
        place = min(bins - 1, int((confidence - 0.5) * 2 * bins))
        sorted_in[place].append((confidence, right))
    reliability_bins = [
        ReliabilityBin(
            sum(confidence for confidence, _ in decisions) / len(decisions),
            sum(right for _, right in decisions) / len(decisions),
            len(decisions),
        )
        for decisions in sorted_in
        if decisions
    ]
    error = sum(
        abs(reliability_bin.accuracy - reliability_bin.confidence) * reliability_bin.count
        for reliability_bin in reliability_bins
    ) / max(1, len(logits))
    return Reliability(reliability_bins, error)
