"""Training of a reward model on groups of answers: a `Task` of the training loop.

Shapes: P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.objectives.answers import ItemLosses
from audiollm.rl.objectives.catalog import ObjectiveTerm
from audiollm.rl.objectives.figures import StepFigures
from audiollm.rl.objectives.registry import mixed_losses
from audiollm.rl.preference.batches import MicroBatch, StepMaker
from audiollm.rl.preference.task import MetricSums, PreferenceTask
from audiollm.rl.reward.calibration import Reliability, reliability_of
from audiollm.rl.reward.model import RewardModel


class RewardTask(PreferenceTask):
    """As `PreferenceTask`, with scores in place of log-probabilities; its loss is as exact."""

    def __init__(
        self,
        model: RewardModel,
        steps: StepMaker[Any, Any, Any],
        terms: Sequence[ObjectiveTerm],
        set_aside: SetAside,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(model.policy, steps, terms, set_aside, ranks)
        self._model, self._root = model, model.root
        self.reliability: Reliability | None = None
        """Of the last evaluation; None before it, and where nothing is compared in pairs."""

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
        """Means over the held-out items, and the calibration error of the probability that an answer is better."""
        sums, margins = MetricSums(), []
        for batch in self._steps.held_out():
            self._set_aside.add(batch.bad)
            for each in self._evened(batch.micro):
                found = self._losses(each, StepFigures())
                sums.add({"loss": found.loss_I, **found.metrics})
                margins += found.metrics["margin"].tolist() if "margin" in found.metrics else []
        every = [margin for row in self._ranks.gather(margins) for margin in row]
        figures = sums.means(self._ranks)
        if every:
            self.reliability = reliability_of(every)
            figures["calibration_error"] = self.reliability.error
        return figures

    def _losses(self, micro: MicroBatch[Any], figures: StepFigures, with_kl: bool = False) -> ItemLosses:
        own = micro.to(self.device)
        scores = self._model.answer_scores(self._root, own.batch)
        return mixed_losses(self._terms, scores, own.groups, figures)
