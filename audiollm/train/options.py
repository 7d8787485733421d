"""The settings of the loop, as plain data: stages read them without loading torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["auto", "fp32", "bf16", "fp16"]
ScheduleName = Literal["cosine", "wsd", "constant"]
StrategyName = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
Reporter = Literal["tensorboard", "wandb"]
Trained = Literal["all", "audio_ffn", "adapter"] | Sequence[str]


@dataclass(frozen=True)
class ParameterRule:
    """How parameters of some names are optimised; the first rule that fits a name decides."""

    pattern: str
    """As of file names (`*`, `?`), for the whole of `module.parameter`: `model.*audio_mlp*`."""
    rate_factor: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """In place of the loop's, for vectors too; None: the loop's on matrices, 0 on vectors."""
    frozen: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` for matrices (not embeddings or heads): attention learns to look things up in fewer steps."""


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


@dataclass(frozen=True)
class LoopConfig:
    """How to optimise. The budget is one of `steps`, `minutes` and `cpu_minutes`.

    Minutes become a number of steps by a short calibration at the start; they count the training steps
    alone (calibration, evaluation and checkpoints come on top).
    """

    seed: int
    steps: int | None
    minutes: float | None
    learning_rate: float
    cpu_minutes: float | None = None
    """CPU time of this process, all threads together: fair where other programs share the machine."""
    rate_factors: Mapping[str, float] = field(default_factory=dict)
    """By optimizer: a factor on `learning_rate`, 1 where not given."""
    rules: tuple[ParameterRule, ...] = ()
    """By pattern of names (`module.parameter`): other rates and decays, or no training at all."""
    schedule: ScheduleName = "cosine"
    """After the warm-up: `cosine`, `wsd` (at the peak, and down in the last fifth), `constant`."""
    warmup_steps: int | None = None
    """Fewer than the steps; None: `default_warmup_steps`, and a tenth of the steps at most."""
    default_warmup_steps: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    """0 for no averaging; otherwise the averaged weights are what the run ends with."""
    precision: Precision = "auto"
    strategy: StrategyName = "auto"
    """How several ranks train together; `auto` is `ddp`. One process needs none, whatever is set."""
    unused_parameters: bool = False
    """Some steps leave some parameters without a gradient; DDP must then look for them at every step. Otherwise a
    trained parameter without a gradient in the first step ends the run."""
    activation_checkpointing: bool = False
    """Activations are computed again in the backward pass; a module offers `gradient_checkpointing_enable`."""
    compile: bool = False
    """Trained modules go through `torch.compile`."""
    log_every: int = 20
    evaluate_every: int = 0
    """Steps between evaluations; the last step is always followed by one."""
    evaluations: int = 0
    """In place of `evaluate_every`: so many, evenly over the steps however many these are."""
    best: str = ""
    """A figure of the evaluation: its best weights are kept in `best`, and are what the run ends with."""
    best_is: Literal["lower", "higher"] = "lower"
    checkpoint_seconds: float = 20.0
    """At least so long between checkpoints, and 20 times as long as writing one takes; 0: after every step."""
    spike_deviations: float = 0.0
    """A loss that is so many standard deviations above its moving mean spoils the step; 0: none does."""
    rollbacks: int = 3
    """So many steps at most are left out, when they are not finite or a spike, before the run stops."""
    report_to: tuple[Reporter, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        if sum(budget is not None for budget in (self.steps, self.minutes, self.cpu_minutes)) != 1:
            raise ValueError("give one of steps, minutes and cpu_minutes")
        if self.evaluate_every and self.evaluations:
            raise ValueError("give one of evaluate_every and evaluations")
        if self.best and not (self.evaluate_every or self.evaluations):
            raise ValueError(
                f"best is {self.best!r}, but evaluate_every and evaluations are 0: only the end is evaluated"
            )

    def warmup(self, steps: int) -> int:
        """The steps of the warm-up in a run of so many."""
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
