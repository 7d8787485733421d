"""Settings of the training loop and of every training stage: budget, batch, learning rate, precision. Loads no torch.

Each setting is declared in one class. A stage's settings are saved in the order of these classes, bases from the last
to the first, and fingerprints of finished runs depend on that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from audiollm.recipe.config import BUDGETS
from audiollm.recipe.plug_ins import is_import_path
from audiollm.recipe.stages import Size, StageConfig

Precision = Literal["auto", "fp32", "bf16", "fp16"]
ScheduleName = Literal["cosine", "wsd", "constant"]
StrategyName = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
MergeMethod = Literal["linear", "ties", "dare_linear"]
"""How models that were trained side by side become one; `supervised/merging.py` has the sources."""
FrozenPlacement = Literal["whole", "sharded", "cpu"]
FrozenFormat = Literal["fp32", "bf16", "int8", "nf4"]
REPORTERS = ("tensorboard", "wandb", "mlflow", "trackio")
Trained = Literal["all", "audio_ffn", "adapter"] | Sequence[str]


@dataclass(frozen=True)
class ParameterRule:
    """How parameters of some names are optimised; the first rule that fits a name decides."""

    pattern: str
    """Shell pattern (`*`, `?`) that fits the whole of `module.parameter`: `model.*audio_mlp*`."""
    rate_factor: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """Weight decay of these parameters, vectors included; None: the loop's on matrices, 0 on vectors."""
    frozen: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` for matrices and convolutions, not embeddings or heads: attention learns to look up in fewer steps."""


@dataclass(frozen=True)
class LoRASettings:
    """Low-rank adapters (arXiv 2106.09685)."""

    rank: int = 16
    alpha: int = 32
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layers, by the end of their names."""
    trained_beside: tuple[str, ...] = ()
    """Modules that are trained whole and saved with the adapter (new embeddings, a head), by the end of their names."""
    excluded: tuple[str, ...] = ()
    """Modules in which no layer gets an adapter, by the end of their names: `audio_tower` leaves the encoder as it is,
    so that rows of `encode_features` stand for recordings."""


Share = Annotated[float, Field(ge=0, le=1)]


class PromptMix(BaseModel):
    """How often a talker's prompts are shown or learned in another form, as shares of the samples: drawn for each by
    its id, the same in every pass."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    interleaved: Share | None = None
    """Words beside the frames, in place of all words before them; None: as the model speaks by default."""
    no_language: Share = 0.0
    no_instruction: Share = 0.0
    no_voice: Share = 0.0
    vector: Share = 0.0
    """A named voice by the speaker encoder's vector of the recording, in place of its name."""
    learned_turns: Share = 0.0
    """The earlier turns of a conversation are targets, too, but for those of weight 0 (CSM)."""


class LoopSettings(BaseModel):
    """Base of the groups below."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class TimeBudget(LoopSettings):
    """A budget of time. A short calibration at the start turns it into a number of steps."""

    minutes: float | None = Field(None, gt=0)
    """Minutes of training steps; calibration, evaluations and checkpoints come on top."""
    cpu_minutes: float | None = Field(None, gt=0)
    """As `minutes`, in CPU time of all threads: fair where other programs share the machine. Not for GPUs."""


class RunSettings(LoopSettings):
    """How the steps are computed and kept."""

    precision: Precision = "auto"
    """`auto`: bf16 on a GPU and on CPUs where it was measured to be faster, else fp32. fp16 scales its
    losses."""
    checkpoint_seconds: float = Field(20.0, ge=0)
    """Least time between checkpoints; never less than 20 times what writing one takes. 0: one after every step."""
    seed: int = 0
    """Seed of weights, order and draws; by default the recipe's."""


class OptimizerSettings(LoopSettings):
    """How weights are optimised, on any number of ranks."""

    rules: tuple[ParameterRule, ...] = ()
    """By pattern of names: `{pattern, rate_factor, weight_decay, frozen, optimizer}`; the first to fit decides."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up: `cosine`, `wsd` (at the peak, then down in the last fifth), `constant`."""
    warmup_steps: int | None = Field(None, ge=1)
    """Steps of the warm-up; None: by the size, and a tenth of the steps at most."""
    weight_decay: float = Field(0.01, ge=0)
    """Of matrices; norms and biases have none."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient of an optimizer's parameters."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""
    strategy: StrategyName = "auto"
    """How several ranks train: `ddp` (`auto`), `fsdp2`, `zero2`, `zero3`. One process needs none."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more work."""
    compile: bool = False
    """Train through `torch.compile`."""
    spike_deviations: float = Field(0.0, ge=0)
    """Skip a step whose loss is this many standard deviations above its moving mean; 0: skip none."""
    rollbacks: int = Field(3, ge=0)
    """Steps that may be skipped, as a spike or not finite, before the run stops; raised, a stopped run goes on."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Where figures, alarms, answers and sounds are drawn beside the files: `tensorboard`, `wandb`, `mlflow`,
    `trackio`, or a class of your own (`package.module:Class`). All stay on this machine unless their variables
    (WANDB_MODE, MLFLOW_TRACKING_URI) say otherwise."""

    @field_validator("report_to")
    @classmethod
    def _are_boards(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in REPORTERS and not is_import_path(name):
                raise ValueError(f"{name!r} is none of {', '.join(REPORTERS)}, and no package.module:Class")
        return names

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
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


class LoopConfig(OptimizerSettings, RunSettings, TimeBudget):
    """The loop's settings: those above, and what the stage decides. One of `steps`, `minutes`, `cpu_minutes` is set."""

    model_config = ConfigDict(frozen=True)

    steps: int | None = None
    learning_rate: float
    rate_factors: Mapping[str, float] = Field(default_factory=dict)
    """Factors on `learning_rate` by name of the optimizer; 1 where not given."""
    default_warmup_steps: int = 100
    """Steps of the warm-up where `warmup_steps` is None; a tenth of the steps at most."""
    betas: tuple[float, float] = (0.9, 0.98)
    unused_parameters: bool = False
    """Some steps leave some parameters without a gradient; DDP must then look for them at every step. Otherwise a
    trained parameter without a gradient in the first step ends the run."""
    log_every: int = 20
    evaluate_every: int = 0
    """Steps between evaluations; the last step is always followed by one."""
    evaluations: int = 0
    """Number of evaluations, evenly over the steps, in place of `evaluate_every`."""
    best: str = ""
    """A figure of the evaluation: its best weights are kept in `best`, and are what the run ends with."""
    best_is: Literal["lower", "higher"] = "lower"

    @model_validator(mode="after")
    def _check(self) -> LoopConfig:
        if sum(budget is not None for budget in (self.steps, self.minutes, self.cpu_minutes)) != 1:
            raise ValueError("give one of steps, minutes and cpu_minutes")
        if self.evaluate_every and self.evaluations:
            raise ValueError("give one of evaluate_every and evaluations")
        if self.best and not (self.evaluate_every or self.evaluations):
            raise ValueError(
                f"best is {self.best!r}, but evaluate_every and evaluations are 0: only the end is evaluated"
            )
        return self

    def warmup(self, steps: int) -> int:
        """The steps of the warm-up in a run of `steps`."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(self.default_warmup_steps, max(1, steps // 10))

    def is_evaluated(self, step: int, steps: int) -> bool:
        """Whether an evaluation follows when `step` of `steps` are done."""
        if step == steps:
            return True
        if self.evaluations:
            return step * self.evaluations // steps > (step - 1) * self.evaluations // steps
        return bool(self.evaluate_every) and step % self.evaluate_every == 0


class StepBudget(StageConfig):
    """The size, and a budget in steps."""

    size: Size = "tiny"
    """What shapes and budgets are by default; by default the recipe's."""
    steps: int | None = Field(None, ge=10)
    """The budget: `steps`, `passes`, `minutes` or `cpu_minutes`, one of them."""
    passes: float | None = Field(None, gt=0)
    """Passes over all training data."""


class StepSettings(LoopSettings):
    """One optimizer step."""

    batch_size: int | None = Field(None, ge=1)
    """Samples of an optimizer step, over all ranks."""
    learning_rate: float | None = Field(None, gt=0)
    """At the peak of the schedule; None: by the size."""


class AdaptationSettings(LoopSettings):
    """The part of a model that is trained."""

    trained: Literal["all", "audio_ffn", "adapter"] | list[str] = "all"
    """The trained part: `all`, `audio_ffn` (what the audio path adds), `adapter` (LoRA), or patterns of names."""
    lora: LoRASettings = LoRASettings()
    """The adapter of `trained: adapter`."""
    frozen_weights: FrozenFormat = Field("fp32", exclude_if=lambda value: value == "fp32")
    """How weights that do not learn are stored: `bf16`, `int8`, or `nf4` (4 bits, needs bitsandbytes). What is trained,
    norms and optimizer stay in float32, and so does the model that is saved."""


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
    """Of matrices; norms and biases have none."""
    ema_decay: float = Field(0.99, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelTrainingConfig:
        if "lora" in self.model_fields_set and self.trained != "adapter":
            raise ValueError("lora is set, but trained is not `adapter`: nothing would have an adapter")
        if self.frozen_weights != "fp32" and self.trained == "all" and not self.freezes_encoder:
            raise ValueError(
                f"frozen_weights is {self.frozen_weights}, and trained is `all`: trained weights stay in float32, "
                "and none is left; train an adapter or patterns of names, or leave frozen_weights out"
            )
        return self

    @property
    def freezes_encoder(self) -> bool:
        """Whether an audio encoder is frozen whatever `trained` says."""
        return False
