"""The stage `train`: its settings, the rules of `size`, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.recipe import InputPath, Stage, StagePlan, chosen
from audiollm.runner import Context
from audiollm.train.settings import TrainingConfig


@dataclass(frozen=True)
class SizeRule:
    """What follows from `size`. Heads are 64 wide."""

    hidden_size: int
    num_layers: int
    batch_size: int
    steps: int | None
    passes: float | None
    learning_rate: float
    vocab_size: int


SIZES: dict[str, SizeRule] = {
    "tiny": SizeRule(192, 6, 48, None, 24, 2e-3, 1_024),
    "small": SizeRule(512, 12, 64, 20_000, None, 6e-4, 8_192),
    "300m": SizeRule(1024, 16, 256, 100_000, None, 3e-4, 32_768),
    "1b": SizeRule(2048, 16, 512, 250_000, None, 2e-4, 128_256),
    "3b": SizeRule(3072, 28, 512, 500_000, None, 1.5e-4, 128_256),
}


class ModelConfig(BaseModel):
    """The model of `train`. What is None follows from `size`."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["dual_ffn"] = "dual_ffn"
    hidden_size: int | None = Field(None, ge=16)
    num_layers: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=16)
    dropout: float = Field(0.1, ge=0, lt=1)


class TrainConfig(TrainingConfig):
    """Settings of `train`. What is None follows from `size`."""

    shards: InputPath
    model: ModelConfig = ModelConfig()
    text_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the samples whose text is hidden, so that text guidance works."""
    speaker_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the samples whose speaker is hidden, so that speaker guidance works."""
    corrupt_codes: float = Field(0.16, ge=0, lt=1)
    """Up to this share of a sample's input codes is replaced at random (targets are not)."""
    text_weight: float = Field(0.1, ge=0)
    audio_weight: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _follow_size(self) -> TrainConfig:
        rule, model = SIZES[self.size], self.model
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        hidden = model.hidden_size or rule.hidden_size
        heads = model.num_heads or max(1, hidden // 64)
        if hidden % (2 * heads):
            raise ValueError(f"hidden_size {hidden} must be a multiple of 2 x num_heads {heads}")
        filled = {
            "hidden_size": hidden,
            "num_heads": heads,
            "num_layers": model.num_layers or rule.num_layers,
            "intermediate_size": model.intermediate_size or intermediate_size(hidden),
        }
        self.model = model.model_copy(update=filled)
        return self


def intermediate_size(hidden_size: int) -> int:
    """Feed-forward width: 8/3 of the hidden size (SwiGLU), to the next multiple of 64."""
    return -(-hidden_size * 8 // 3 // 64) * 64


def model_parameters(config: TrainConfig, num_codebooks: int = 8, codebook_size: int = 1026) -> int:
    """Parameters in closed form with the vocabulary as large as it may get (a test compares it with a model's)."""
    model = config.model
    hidden, layers = chosen(model.hidden_size), chosen(model.num_layers)
    layer = 4 * hidden * hidden + 2 * 3 * hidden * chosen(model.intermediate_size) + 4 * hidden
    vocabulary = SIZES[config.size].vocab_size + num_codebooks * codebook_size
    return layers * layer + hidden + 2 * hidden * vocabulary


def _run(config: TrainConfig, context: Context) -> dict[str, Any]:
    from audiollm.train.run import train_model

    return train_model(config, context)


def _plan(config: TrainConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    parameters = model_parameters(config)
    frames = max((plan.facts.get("frames", 0.0) for plan in plans.values()), default=0.0)
    clips = max((plan.facts.get("clips", 0.0) for plan in plans.values()), default=0.0)
    length = frames / clips + 40 if clips else 100.0
    batch = chosen(config.batch_size)
    wide = chosen(config.model.num_layers) * 24 * chosen(config.model.hidden_size)
    activations = batch * length * (wide + 24_624) * 4
    steps = config.steps_for(clips / batch)
    return StagePlan(
        parameters=parameters,
        tokens=(steps or 0) * batch * length,
        memory_mb=700 + (parameters * 16 + activations) / 2**20,
        disk_mb=parameters * 20 / 2**20,
        seconds=config.minutes * 60 if config.minutes else None,
        note=f"{config.budget_text()}, {batch} sequences a step",
    )


STAGE = Stage(
    kind="train",
    config=TrainConfig,
    run=_run,
    artifacts={"checkpoint": "model"},
    help="train the DualFFN decoder on the shards",
    plan=_plan,
)
