"""Settings that every training stage has: its budget, batch, learning rate and precision."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from audiollm.recipe.stages import Size, StageConfig, chosen
from audiollm.train.options import (
    LoopConfig,
    LoRASettings,
    ParameterRule,
    Precision,
    Reporter,
    ScheduleName,
    StrategyName,
)


class TrainingConfig(StageConfig):
    """Base of the training stages' settings. What is None follows from `size`."""

    incidental: ClassVar[frozenset[str]] = frozenset({"checkpoint_seconds"})

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
    precision: Precision = "auto"
    """`auto`: bf16 on a GPU and on CPUs that compute it (AMX, AVX512_BF16), else fp32. fp16 scales its losses."""
    checkpoint_seconds: float = Field(20.0, ge=0)
    """Time between checkpoints, and 20 times what writing one takes at least; 0: after every step."""
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


class ModelTrainingConfig(TrainingConfig):
    """Base of the settings of stages that train a language model, on any number of ranks."""

    incidental: ClassVar[frozenset[str]] = TrainingConfig.incidental | {"strategy", "report_to", "rollbacks"}

    trained: Literal["all", "audio_ffn", "adapter"] | list[str] = "all"
    """What is trained: `all`, `audio_ffn` (what the audio path adds), `adapter` (LoRA), or patterns of names."""
    lora: LoRASettings = LoRASettings()
    """Of `trained: adapter`."""
    rules: tuple[ParameterRule, ...] = ()
    """By pattern of names: `{pattern, rate_factor, weight_decay, frozen, optimizer}`; the first that fits decides."""
    schedule: ScheduleName = "cosine"
    """After the warm-up: `cosine`, `wsd` (at the peak, and down in the last fifth), `constant`."""
    warmup_steps: int | None = Field(None, ge=1)
    """None: by the size, and a tenth of the steps at most."""
    weight_decay: float = Field(0.05, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)
    """Of the averaged weights that the run ends with; 0 for none."""
    strategy: StrategyName = "auto"
    """How several ranks train: `ddp` (`auto`), `fsdp2`, `zero2`, `zero3`. One process needs none."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more work."""
    compile: bool = False
    """Train through `torch.compile`."""
    spike_deviations: float = Field(0.0, ge=0)
    """Leave a step out whose loss is so many standard deviations above its moving mean; 0: none."""
    rollbacks: int = Field(3, ge=0)
    """How many steps may be left out, as a spike or not finite, before the run stops; raised, it goes on."""
    report_to: tuple[Reporter, ...] = ("tensorboard",)

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelTrainingConfig:
        if "lora" in self.model_fields_set and self.trained != "adapter":
            raise ValueError("lora is set, but trained is not `adapter`: nothing would have an adapter")
        if self.strategy in ("zero2", "zero3") and self.ema_decay:
            raise ValueError(
                f"{self.strategy} cannot average weights: set ema_decay to 0, or strategy to fsdp2"
            )
        muon = [rule.pattern for rule in self.rules if rule.optimizer == "muon"]
        if muon and self.strategy not in ("auto", "ddp"):
            raise ValueError(
                f"{self.strategy} has no Muon, as rules ask for {muon[0]!r}: set strategy to ddp"
            )
        return self

    def loop_config(self, steps: int | None, default_warmup_steps: int, **others: Any) -> LoopConfig:
        """All of these settings for the loop, with what the stage adds (`evaluations`, `best`, ...)."""
        same = (
            "seed", "minutes", "cpu_minutes", "precision", "checkpoint_seconds", "rules", "schedule", "weight_decay",
            "clip_norm", "ema_decay", "strategy", "activation_checkpointing", "compile", "spike_deviations",
            "rollbacks", "report_to",
        )  # fmt: skip
        return LoopConfig(
            steps=steps,
            learning_rate=chosen(self.learning_rate),
            warmup_steps=self.warmup_steps,
            default_warmup_steps=default_warmup_steps,
            **{name: getattr(self, name) for name in same},
            **others,
        )
