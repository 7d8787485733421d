"""Settings that every training stage has: its budget, batch, learning rate and precision."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from audiollm.recipe import Size, StageConfig


class TrainingConfig(StageConfig):
    """Base of the training stages' settings. What is None follows from `size`."""

    size: Size = "tiny"
    steps: int | None = Field(None, ge=10)
    """The budget: `steps`, `passes`, `minutes` or `cpu_minutes`, one of them."""
    passes: float | None = Field(None, gt=0)
    """Times that all training data is gone through."""
    minutes: float | None = Field(None, gt=0)
    """Of training steps alone; turned into a number of steps once, by a calibration on the machine at hand."""
    cpu_minutes: float | None = Field(None, gt=0)
    """As `minutes`, in CPU time of all threads: fair where other programs share the machine. Not for GPUs."""
    batch_size: int | None = Field(None, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on a GPU and on CPUs with bf16 matrix units, else fp32."""
    checkpoint_seconds: float = Field(20.0, ge=0)
    """Time between checkpoints."""
    seed: int = 0

    def follow_size(
        self, steps: int | None, passes: float | None, batch_size: int, learning_rate: float
    ) -> None:
        """Fill in what is not set.

        Raises:
            ValueError: more than one budget.
        """
        budgets = ("steps", "passes", "minutes", "cpu_minutes")
        given = [name for name in budgets if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one budget, not {' and '.join(given)}")
        if not given:
            self.steps, self.passes = steps, passes
        self.batch_size = self.batch_size or batch_size
        self.learning_rate = self.learning_rate or learning_rate

    def steps_for(self, steps_per_pass: float) -> int | None:
        """The number of steps, or None where minutes decide."""
        if self.passes is not None:
            return max(10, math.ceil(self.passes * steps_per_pass))
        return self.steps

    def budget_text(self) -> str:
        if self.passes is not None:
            return f"{self.passes:g} passes"
        if self.cpu_minutes is not None:
            return f"{self.cpu_minutes:g} CPU minutes"
        return f"{self.steps} steps" if self.steps else f"{self.minutes:g} minutes"
