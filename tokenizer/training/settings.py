"""The stages `train_tokenizer` and `tokenize`: their settings, and what they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan, chosen
from audiollm.train.settings import TrainingConfig

FRAME_RATE = 25
HIGGS_PARAMETERS = 200_343_777
"""Of the published structure, 94 M of them the teacher's (a test compares with the model's)."""


@dataclass(frozen=True)
class SizeRule:
    """What follows from `size`."""

    mel_hidden_size: int
    hidden_size: int
    blocks: tuple[int, int, int, int]
    """Encoder at the mel and the frame rate, decoder at the frame and the mel rate."""
    batch_size: int
    steps: int | None
    passes: float | None
    learning_rate: float


SIZES: dict[str, SizeRule] = {
    "tiny": SizeRule(192, 320, (2, 4, 4, 3), 16, None, 22, 1.5e-3),
    "small": SizeRule(256, 512, (3, 6, 6, 4), 16, 20_000, None, 1e-3),
    "300m": SizeRule(384, 640, (3, 8, 8, 5), 64, 200_000, None, 5e-4),
    "1b": SizeRule(384, 768, (3, 8, 8, 5), 64, 400_000, None, 3e-4),
    "3b": SizeRule(384, 768, (3, 8, 8, 5), 128, 500_000, None, 3e-4),
}
"""Millions of parameters: 7, 23, 50, 67, 67 (a larger language model does not need a larger codec)."""


class TrainTokenizerConfig(TrainingConfig):
    """Settings of `train_tokenizer`. What is None follows from `size`."""

    audio: InputPath
    """A folder of recordings (every 20th file is held out), or samples (`compose`'s) with their split."""
    preset: Literal["native", "higgs"] = "native"
    """`native`: the project's own structure; `higgs`: the published one, for transformers. Both 25 Hz, 8 x 1024."""
    start: InputPath | None = None
    """A tokenizer's folder (of that preset) to go on from: its shape and weights, codebooks too."""
    teacher: InputPath | Literal["own", "none"] | None = None
    """A Hugging Face audio encoder's folder; `own`: one is trained on the same files first; `none`. By default `own`
    for `native`; `higgs` has its teacher inside, and without a `start` needs a HuBERT's folder to put there."""
    teacher_share: float = Field(0.1, gt=0, lt=1)
    """How many steps the `own` teacher is trained for, as a share of the tokenizer's."""
    quantizer: Literal["rvq", "split_rvq", "fsq"] = "rvq"
    crop_frames: int = Field(24, ge=4)
    """Length of a training crop in 40 ms frames."""
    mel_hidden_size: int | None = Field(None, ge=16)
    """Width at 100 Hz."""
    hidden_size: int | None = Field(None, ge=16)
    """Width at 25 Hz."""
    blocks: tuple[int, int, int, int] | None = None
    """ConvNeXt blocks: encoder at 100 Hz and 25 Hz, decoder at 25 Hz and 100 Hz."""
    commitment_weight: float = Field(1.0, ge=0)
    semantic_weight: float = Field(1.0, ge=0)
    adversary_share: float = Field(0.75, ge=0, le=1)
    """Share of the steps before the discriminators begin; 1 for none."""
    quantizer_dropout: float = Field(0.3, ge=0, le=1)

    @model_validator(mode="after")
    def _follow_size(self) -> TrainTokenizerConfig:
        rule = SIZES[self.size]
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        self.mel_hidden_size = self.mel_hidden_size or rule.mel_hidden_size
        self.hidden_size = self.hidden_size or rule.hidden_size
        self.blocks = self.blocks or rule.blocks
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> TrainTokenizerConfig:
        if self.preset == "native":
            self.teacher = self.teacher or "own"
        elif self.start and self.teacher:
            raise ValueError("preset higgs: its teacher comes with `start`; leave `teacher` out")
        elif not self.start and self.teacher in (None, "own", "none"):
            raise ValueError(
                "preset higgs: give `start`, a tokenizer's folder, or `teacher`, a HuBERT's folder"
            )
        return self


class TokenizeConfig(StageConfig):
    """Settings of `tokenize`."""

    samples: InputPath
    codec: InputPath
    """A codec's folder."""
    encodings: int = Field(4, ge=1)
    """Encodings of each training sample: the first plain, the others at random gain, speed and shift."""
    sound: bool = False
    """Keep the sound of what is heard, too, for a `train` with `audio_in: features`; it is not varied."""
    samples_per_shard: int = Field(512, ge=1)
    seed: int = 0


def _train_tokenizer(config: TrainTokenizerConfig, context: Context) -> dict[str, Any]:
    from tokenizer.training.run import train_tokenizer

    return train_tokenizer(config, context)


def _tokenize(config: TokenizeConfig, context: Context) -> dict[str, Any]:
    from tokenizer.training.run import tokenize

    return tokenize(config, context)


def tokenizer_parameters(
    mel_hidden: int, hidden: int, blocks: tuple[int, int, int, int], latent: int = 64, mels: int = 100
) -> int:
    """Trainable parameters of the native structure without a semantic head (a test compares with the model's)."""
    at_mel, at_frame = blocks[0] + blocks[3], blocks[1] + blocks[2]
    towers = sum(
        n * (6 * width * width + 15 * width) for n, width in ((at_mel, mel_hidden), (at_frame, hidden))
    )
    inputs = 7 * mels * mel_hidden + mel_hidden + 7 * latent * hidden + hidden
    strided = 8 * mel_hidden * hidden + hidden + 4 * mel_hidden
    outputs = 2 * hidden + latent * (hidden + 1) + 2 * mel_hidden + 962 * (mel_hidden + 1)
    return towers + inputs + strided + outputs


def _plan_train(config: TrainTokenizerConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    mel_hidden, hidden, blocks = (
        chosen(config.mel_hidden_size),
        chosen(config.hidden_size),
        chosen(config.blocks),
    )
    parameters = tokenizer_parameters(mel_hidden, hidden, blocks)
    if config.preset == "higgs":
        parameters, mel_hidden, hidden = HIGGS_PARAMETERS, 1024, 2048  # widths: what its activations come to
    frames = chosen(config.batch_size) * config.crop_frames
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    steps = config.steps_for(audio_s * FRAME_RATE / frames)
    widths = 4 * mel_hidden * (blocks[0] + blocks[3]) + hidden * (blocks[1] + blocks[2])
    return StagePlan(
        parameters=parameters,
        tokens=float((steps or 0) * frames),
        memory_mb=900 + (parameters * 16 + frames * widths * 14 * 4) / 2**20,
        disk_mb=parameters * (3 * 16 + 4) / 2**20,  # three checkpoints while one is replaced, and the model
        seconds=config.minutes * 60 if config.minutes else None,
        note=config.budget_text(),
    )


def _plan_tokenize(config: TokenizeConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    clips = max((plan.facts.get("clips", 0.0) for plan in plans.values()), default=0.0)
    frames = audio_s * FRAME_RATE * config.encodings
    return StagePlan(
        tokens=frames,
        memory_mb=900,
        disk_mb=(frames * 16 + clips * 3000) / 2**20,
        note=f"{config.encodings} encodings of {audio_s / 60:.0f} minutes",
        facts={"frames": audio_s * FRAME_RATE, "clips": clips},
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
