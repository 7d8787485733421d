"""The settings of `train_reward`. Loads no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from audiollm.rl.objectives.catalog import WhatIsRead
from audiollm.rl.objectives.settings import BradleyTerrySettings
from audiollm.rl.preference.settings import AnswerTrainingConfig, ObjectiveChoice


class RewardConfig(AnswerTrainingConfig):
    """Settings of `train_reward`. The score head is always trained; `trained` says what is trained beside it."""

    objective: list[ObjectiveChoice] = Field([ObjectiveChoice(name="bradley_terry")], min_length=1)
    """`bradley_terry` (pairs), `plackett_luce` (ranked lists), `regression` (scores) or `process` (scores of
    steps)."""
    margin_scale: float = Field(0.0, ge=0)
    """Least difference that `bradley_terry` asks of two scores, per unit by which the chosen answer was judged better
    (the difference of the answers' scores, or `margin` in the metadata); 0: no margin, and calibrated
    probabilities."""

    _reads: ClassVar[tuple[WhatIsRead, ...]] = ("scores", "step_scores")
    _other_stage: ClassVar[str] = "train_preference"

    @property
    def scored(self) -> Literal["answers", "steps"]:
        """What has a score: whole answers, or each of their steps."""
        return "steps" if self.group_kind == "steps" else "answers"

    @property
    def has_bias(self) -> bool:
        """Whether a score means something by itself, and not only beside another one."""
        return any(
            term.settings.centering > 0
            if isinstance(term.settings, BradleyTerrySettings)
            else term.name != "plackett_luce"
            for term in self.terms
        )
