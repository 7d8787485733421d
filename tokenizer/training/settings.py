"""Settings of the stages `train_tokenizer` and `tokenize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from audiollm.processes import available_cpus
from audiollm.recipe.stages import FROM_HUB, InputModel, InputPath, StageConfig
from audiollm.train.settings import TrainingConfig

SAMPLES_PER_WORKER = 100
"""Samples of `tokenize` by which one more process pays: it takes as long to start as some dozens of encodings."""


@dataclass(frozen=True)
class TokenizerSizeRule:
    """The settings that follow from `size`."""

    mel_hidden_size: int
    hidden_size: int
    blocks: tuple[int, int, int, int]
    """Encoder at the mel and the frame rate, decoder at the frame and the mel rate."""
    batch_size: int
    steps: int | None
    passes: float | None
    learning_rate: float
    adversary_share: float = 0.3
    passes_in_closed_form: float | None = None
    """In place of `passes` where training starts in closed form and no teacher has to be followed."""


SIZES: dict[str, TokenizerSizeRule] = {
    "tiny": TokenizerSizeRule(192, 320, (2, 4, 4, 3), 16, None, 22, 1.5e-3, 1.0, 5),
    "small": TokenizerSizeRule(256, 512, (3, 6, 6, 4), 16, 20_000, None, 1e-3),
    "300m": TokenizerSizeRule(384, 640, (3, 8, 8, 5), 64, 200_000, None, 5e-4),
    "1b": TokenizerSizeRule(384, 768, (3, 8, 8, 5), 64, 400_000, None, 3e-4),
    "3b": TokenizerSizeRule(384, 768, (3, 8, 8, 5), 128, 500_000, None, 3e-4),
}
"""Millions of parameters: 7, 23, 50, 67, 67 (a larger language model does not need a larger codec)."""


class TrainTokenizerConfig(TrainingConfig):
    """Settings of `train_tokenizer`. What is None follows from `size`."""

    audio: InputPath
    """A folder of recordings (every 20th file is held out), or samples (`compose`'s) with their split."""
    preset: Literal["native", "higgs"] = "native"
    """`native`: the project's own structure; `higgs`: the published one, for transformers. Both 25 Hz, 8 x 1024."""
    start: InputModel | None = None
    """A tokenizer's folder (of that preset) to go on from: its shape and weights, codebooks too."""
    teacher: Annotated[InputPath | Literal["own", "none"] | None, FROM_HUB] = None
    """A Hugging Face audio encoder's folder; `own`: one is trained on the same files first; `none`. By default `own`
    for `native`; `higgs` has its teacher inside, and without a `start` needs a HuBERT's folder to put there."""
    teacher_share: float = Field(0.1, gt=0, lt=1)
    """Steps of the `own` teacher's training, as a share of the tokenizer's steps."""
    quantizer: Literal["rvq", "split_rvq", "fsq"] = "rvq"
    """`rvq`: residual codebooks; `split_rvq`: the first one is semantic, beside the others; `fsq`: scalar
    quantization."""
    crop_frames: int = Field(24, ge=4)
    """Length of a training crop in 40 ms frames."""
    mel_hidden_size: int | None = Field(None, ge=16)
    """Width at 100 Hz."""
    hidden_size: int | None = Field(None, ge=16)
    """Width at 25 Hz."""
    blocks: tuple[int, int, int, int] | None = None
    """ConvNeXt blocks: encoder at 100 Hz and 25 Hz, decoder at 25 Hz and 100 Hz."""
    harmonic_source: bool = True
    """For `native`: the codes carry pitch and voicing, and the decoder makes the harmonics of a voice from them."""
    linear_path: bool = True
    """For `native`: latents begin as principal components of log-mel frames, and log-magnitudes as a regression on
    them, in closed form before the first step; training adds to both. With `teacher: none`, size `tiny` then takes 5
    passes in place of 22."""
    pitch_weight: float = Field(1.0, gt=0)
    """Weight of the loss of pitch and voicing."""
    commitment_weight: float = Field(1.0, ge=0)
    """Weight of the distance of latents to their codes."""
    semantic_weight: float = Field(1.0, ge=0)
    """Weight of predicting the teacher's features."""
    adversary_share: float | None = Field(None, ge=0, le=1)
    """Share of the steps before the discriminators begin; 1 for none. By default 0.3, and 1 for `tiny`."""
    quantizer_dropout: float = Field(0.3, ge=0, le=1)
    """Share of the clips that are quantized by the first codebooks alone, a drawn number of them."""

    @model_validator(mode="after")
    def _follow_size(self) -> TrainTokenizerConfig:
        rule = SIZES[self.size]
        passes = rule.passes
        if self.starts_in_closed_form and self.teacher == "none":
            passes = rule.passes_in_closed_form or passes
        self.follow_size(rule.steps, passes, rule.batch_size, rule.learning_rate)
        self.mel_hidden_size = self.mel_hidden_size or rule.mel_hidden_size
        self.hidden_size = self.hidden_size or rule.hidden_size
        self.blocks = self.blocks or rule.blocks
        if self.adversary_share is None:
            self.adversary_share = rule.adversary_share
        return self

    @property
    def starts_in_closed_form(self) -> bool:
        """Whether the linear path is fitted before the first step."""
        return self.preset == "native" and self.linear_path and self.start is None

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

    incidental: ClassVar[frozenset[str]] = frozenset({"workers"})
    samples: InputPath
    """Samples whose recordings are encoded."""
    codec: InputModel
    """A codec's folder."""
    workers: int | None = Field(None, ge=1)
    """Processes that encode; the codes do not depend on it. Default: one for each CPU where that many pay, one beside a
    GPU."""
    encodings: int = Field(4, ge=1)
    """Encodings of each training sample: the first plain, the others at random gain, speed and shift. A stream of an
    interpreter has one, since its actions are bound to times."""
    codes_from: InputPath | None = Field(None, exclude_if=lambda value: value is None)
    """Shards that `tokenize` has made with the same codec: a recording that is in them, at the same span and not
    written since, has its codes from there. For streams of the same talks with another lag or another translation."""
    sound: bool | Literal["all"] = False
    """Keep the sound of what is heard, too, for a `train` with `audio_in: features`; it is not varied. `all`: also of
    what is said, for models that hear a voice through an encoder of their own (Qwen3-TTS Base)."""
    samples_per_shard: int = Field(512, ge=1)
    """Most samples of a shard."""
    seed: int = 0
    """Seed of gain, speed and shift of further encodings."""

    def num_workers(self, samples: int) -> int:
        """Processes for so many samples: each takes as long to start as some dozens of encodings."""
        if self.workers is not None:
            return self.workers
        from audiollm.devices import default_device  # settings are read without torch

        most = 1 if default_device().type == "cuda" else available_cpus()
        return max(1, min(most, samples // SAMPLES_PER_WORKER))
