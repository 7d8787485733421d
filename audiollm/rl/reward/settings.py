"""The settings of `train_reward`. Loads no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from audiollm.rl.objectives.catalog import WhatIsRead
from audiollm.rl.preference.settings import AnswerTrainingConfig, ObjectiveChoice


class RewardConfig(AnswerTrainingConfig):
    """Settings of `train_reward`."""

    objective: list[ObjectiveChoice] = Field([ObjectiveChoice(name="bradley_terry")], min_length=1)
    """`bradley_terry` (pairs), `plackett_luce` (ranked lists) or `regression` (scores)."""

    _reads: ClassVar[WhatIsRead] = "scores"
    _other_stage: ClassVar[str] = "train_preference"
