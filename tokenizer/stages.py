"""The stages `train_tokenizer` and `tokenize`: their settings, and what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from audiollm.recipe import InputPath, Size, Stage, StageConfig, StagePlan
from audiollm.runner import Context

# hidden size, blocks (encoder at 100 Hz and 25 Hz, decoder at 25 Hz and 100 Hz), batch, steps, learning rate
_RULES: dict[str, tuple[int, tuple[int, int, int, int], int, int, float]] = {
    "tiny": (256, (3, 4, 4, 4), 16, 2_000, 1.5e-3),
    "small": (384, (4, 6, 6, 6), 16, 20_000, 1e-3),
    "300m": (512, (6, 8, 8, 8), 64, 200_000, 5e-4),
    "1b": (768, (6, 10, 10, 8), 64, 400_000, 3e-4),
    "3b": (1024, (8, 12, 12, 10), 128, 500_000, 3e-4),
}


class TrainTokenizerConfig(StageConfig):
    """Settings of `train_tokenizer`. What is None follows from `size`."""

    audio: InputPath
    """Samples (`compose`'s): their train split is trained on, their test split is held out."""
    preset: Literal["native"] = "native"
    """The structure: `native` is the project's own 25 Hz, 8 x 1024, 2 kbps."""
    size: Size = "tiny"
    steps: int | None = Field(None, ge=10)
    minutes: float | None = Field(None, gt=0)
    """In place of `steps`: turned into a number of steps once, by a short calibration."""
    batch_size: int | None = Field(None, ge=1)
    crop_frames: int = Field(24, ge=4)
    """Length of a training crop in 40 ms frames."""
    hidden_size: int | None = Field(None, ge=16)
    learning_rate: float | None = Field(None, gt=0)
    commitment_weight: float = Field(0.25, ge=0)
    quantizer_dropout: float = Field(0.3, ge=0, le=1)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    checkpoint_seconds: float = Field(20.0, ge=0)
    seed: int = 0

    @model_validator(mode="after")
    def _one_budget(self) -> TrainTokenizerConfig:
        if self.steps is not None and self.minutes is not None:
            raise ValueError("give steps or minutes, not both")
        return self


class TokenizeConfig(StageConfig):
    """Settings of `tokenize`."""

    samples: InputPath
    codec: InputPath
    """A codec's folder."""
    encodings: int = Field(4, ge=1)
    """Encodings of each training clip: the first plain, the others at random gain, speed and shift."""
    samples_per_shard: int = Field(512, ge=1)
    seed: int = 0


def budget(steps: int | None, minutes: float | None, rule: int) -> int | None:
    """Steps as set, by the rule of the size, or None where minutes decide."""
    return steps if steps is not None else None if minutes is not None else rule


def _train_tokenizer(config: TrainTokenizerConfig, context: Context) -> dict[str, Any]:
    from tokenizer.run import train_tokenizer

    return train_tokenizer(config, context)


def _tokenize(config: TokenizeConfig, context: Context) -> dict[str, Any]:
    from tokenizer.run import tokenize

    return tokenize(config, context)


def rule(size: Size) -> tuple[int, tuple[int, int, int, int], int, int, float]:
    """Hidden size, blocks, batch size, steps and learning rate of a size."""
    return _RULES[size]


def tokenizer_parameters(
    hidden: int, blocks: tuple[int, int, int, int], latent: int = 64, mels: int = 80
) -> int:
    """Trainable parameters of the native structure, in closed form (a test compares it with the model's)."""
    block = 6 * hidden * hidden + 15 * hidden
    ends = 7 * hidden * (mels + latent) + 2 * hidden + 2 * hidden + latent * (hidden + 1) + 2 * hidden
    strided = 8 * hidden * hidden + 5 * hidden
    return sum(blocks) * block + ends + strided + 962 * (hidden + 1)


def _plan_train(config: TrainTokenizerConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    hidden, blocks, batch, steps, _ = rule(config.size)
    hidden, batch = config.hidden_size or hidden, config.batch_size or batch
    parameters = tokenizer_parameters(hidden, blocks)
    frames = batch * config.crop_frames
    count = budget(config.steps, config.minutes, steps)
    activations = frames * 4 * hidden * sum(blocks) * 14 * 4 / 2**20
    return StagePlan(
        parameters=parameters,
        tokens=float((count or 0) * frames),
        memory_mb=700 + parameters * 16 / 2**20 + activations,
        disk_mb=parameters * 16 / 2**20,
        seconds=config.minutes * 60 if config.minutes else None,
        note=f"{count} steps" if count else f"{config.minutes} minutes",
    )


def _plan_tokenize(config: TokenizeConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    clips = max((plan.facts.get("clips", 0.0) for plan in plans.values()), default=0.0)
    frames = audio_s * 25 * config.encodings
    return StagePlan(
        tokens=frames,
        memory_mb=900,
        disk_mb=(frames * 16 + clips * 3000) / 2**20,
        note=f"{config.encodings} encodings of {audio_s / 60:.0f} minutes",
        facts={"frames": audio_s * 25, "clips": clips},
    )


TRAIN_TOKENIZER = Stage(
    kind="train_tokenizer",
    config=TrainTokenizerConfig,
    run=_train_tokenizer,
    artifacts={"checkpoint": "model", "examples": "examples.json"},
    help="train the 25 Hz codec from scratch",
    plan=_plan_train,
)
TOKENIZE = Stage(
    kind="tokenize",
    config=TokenizeConfig,
    run=_tokenize,
    artifacts={"shards": "shards"},
    help="encode the samples' audio into shards",
    plan=_plan_tokenize,
)
