"""Settings that every training stage has: its budget, batch, learning rate and precision.

Each setting is declared in one class. A stage's settings are saved in the order of these classes, bases from the last
to the first, and fingerprints of finished runs depend on that order.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from audiollm.recipe.config import BUDGETS
from audiollm.recipe.stages import Size, StageConfig
from audiollm.train.options import (
    LoopConfig,
    LoopSettings,
    LoRASettings,
    OptimizerSettings,
    RunSettings,
    TimeBudget,
)


class StepBudget(StageConfig):
    """The size, and a budget in steps."""

    size: Size = "tiny"
    steps: int | None = Field(None, ge=10)
    """The budget: `steps`, `passes`, `minutes` or `cpu_minutes`, one of them."""
    passes: float | None = Field(None, gt=0)
    """Passes over all training data."""


class StepSettings(LoopSettings):
    """One optimizer step."""

    batch_size: int | None = Field(None, ge=1)
    """Samples of an optimizer step, over all ranks."""
    learning_rate: float | None = Field(None, gt=0)


class AdaptationSettings(LoopSettings):
    """The part of a model that is trained."""

    trained: Literal["all", "audio_ffn", "adapter"] | list[str] = "all"
    """The trained part: `all`, `audio_ffn` (what the audio path adds), `adapter` (LoRA), or patterns of names."""
    lora: LoRASettings = LoRASettings()
    """The adapter of `trained: adapter`."""


class TrainingConfig(RunSettings, StepSettings, TimeBudget, StepBudget):
    """Base of the training stages' settings. What is None follows from `size`."""

    incidental: ClassVar[frozenset[str]] = frozenset({"checkpoint_seconds"})

    def follow_size(
        self, steps: int | None, passes: float | None, batch_size: int, learning_rate: float
    ) -> None:
        """Fill in what is not set.

        Raises:
            ValueError: more than one budget.
        """
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ValueError(f"give one budget, not {' and '.join(budgets)}")
        if not budgets:
            self.steps, self.passes = steps, passes
        self.batch_size = self.batch_size or batch_size
        self.learning_rate = self.learning_rate or learning_rate

    def steps_for(self, steps_per_pass: float) -> int | None:
        """The number of steps, or None where minutes decide."""
        if self.passes is not None:
            return max(10, math.ceil(self.passes * steps_per_pass))
        return self.steps

    def budget_seconds(self) -> float | None:
        """Seconds of a budget in minutes; CPU minutes are spent by all threads at once. None: steps decide."""
        if self.cpu_minutes is not None:
            import torch  # here: settings are read without it

            return self.cpu_minutes * 60 / torch.get_num_threads()
        return None if self.minutes is None else self.minutes * 60

    def budget_text(self) -> str:
        if self.passes is not None:
            return f"{self.passes:g} passes"
        if self.cpu_minutes is not None:
            return f"{self.cpu_minutes:g} CPU minutes"
        return f"{self.steps} steps" if self.steps else f"{self.minutes:g} minutes"

    def loop_config(self, steps: int | None, **decided: Any) -> LoopConfig:
        """The settings that the loop shares with this stage, and those that the stage decides.

        Args:
            steps: the number of steps, as `steps_for` gives it.
            decided: further fields of `LoopConfig`.
        """
        shared = LoopConfig.model_fields.keys() & type(self).model_fields.keys()
        return LoopConfig(**{**{name: getattr(self, name) for name in shared}, "steps": steps, **decided})


class ModelTrainingConfig(OptimizerSettings, AdaptationSettings, TrainingConfig):
    """Base of the settings of stages that train a language model, on any number of ranks."""

    incidental: ClassVar[frozenset[str]] = TrainingConfig.incidental | {"strategy", "report_to", "rollbacks"}

    weight_decay: float = Field(0.05, ge=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelTrainingConfig:
        if "lora" in self.model_fields_set and self.trained != "adapter":
            raise ValueError("lora is set, but trained is not `adapter`: nothing would have an adapter")
        return self
