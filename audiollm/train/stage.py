"""The stage `train`: its settings, the rules of `size`, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from audiollm.data.storage import is_url
from audiollm.recipe import InputPath, Stage, StagePlan, check_input, chosen
from audiollm.runner import Context
from audiollm.train.settings import ModelTrainingConfig


def _check_source(address: str, info: ValidationInfo) -> str:
    return address if is_url(address) else str(check_input(Path(address), info))


SourceAddress = Annotated[str, AfterValidator(_check_source)]


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
    max_tokens: int


SIZES: dict[str, SizeRule] = {
    "tiny": SizeRule(192, 6, 48, None, 24, 2e-3, 1_024, 8_192),
    "small": SizeRule(512, 12, 64, 20_000, None, 6e-4, 8_192, 8_192),
    "300m": SizeRule(1024, 16, 256, 100_000, None, 3e-4, 32_768, 16_384),
    "1b": SizeRule(2048, 16, 512, 250_000, None, 2e-4, 128_256, 16_384),
    "3b": SizeRule(3072, 28, 512, 500_000, None, 1.5e-4, 128_256, 8_192),
}


class ModelConfig(BaseModel):
    """The model of `train`. What is None follows from `size`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    kind: Literal["dual_ffn"] = "dual_ffn"
    hidden_size: int | None = Field(None, ge=16)
    num_layers: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=16)
    dropout: float = Field(0.1, ge=0, lt=1)
    sliding_window: int | None = Field(None, ge=1)
    """Positions that each one sees; None: all before it."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """What computes attention in training; `auto`: flash-attn or torch's own on a GPU in half precision."""


class ShardsConfig(BaseModel):
    """One source of samples."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    path: SourceAddress
    """A folder of shards, or a .jsonl of samples without audio; here, or at any fsspec URL."""
    weight: float | None = Field(None, ge=0)
    """Its share of the samples of a step, relative to the others'; None: as many as it has."""


class TrainConfig(ModelTrainingConfig):
    """Settings of `train`. What is None follows from `size`."""

    incidental: ClassVar[frozenset[str]] = ModelTrainingConfig.incidental | {"workers", "listen", "codec"}

    shards: list[ShardsConfig] = Field(min_length=1)
    """A path, or a list of paths and of `{path, weight}`."""
    model: ModelConfig = ModelConfig()
    start: InputPath | None = None
    """A trained model's folder to begin from, with its vocabulary; None: from scratch."""
    text_tokenizer: InputPath | None = None
    """A folder with a `tokenizer.json` that has the special tokens; None: one is trained on the texts."""
    max_tokens: int | None = Field(None, ge=64)
    """Positions of a pack, which is what is in memory at a time; a step has as many packs as it takes."""
    max_length: int | None = Field(None, ge=16)
    """Positions of a sample; None: those of a pack."""
    too_long: Literal["cut", "refuse"] = "cut"
    """What becomes of longer samples: whole turns are left out, or the end of the first; counted either way."""
    packing: Literal["packed", "sorted", "in_order"] = "packed"
    """First fit; or samples of similar length together; or one after the other. The objective is the same."""
    normalization: Literal["sequence", "token"] = "sequence"
    """Every sequence counts the same, or every target does."""
    audio_reduction: Literal["mean", "sum"] = "mean"
    """Over codebooks."""
    text_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the spoken samples whose text is hidden, so that text guidance works."""
    speaker_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the spoken samples whose speaker is hidden, so that speaker guidance works."""
    corrupt_codes: float = Field(0.16, ge=0, lt=1)
    """Up to this share of a sample's input codes is replaced at random (targets are not)."""
    text_weight: float = Field(0.1, ge=0)
    audio_weight: float = Field(1.0, ge=0)
    workers: int = Field(0, ge=0)
    """Processes that read and pack ahead; 0: the training process itself."""
    strict: bool = False
    """Stop at the first bad sample; otherwise it is set aside, counted and left out."""
    codec: InputPath | None = None
    """Of the shards: with it, the same few held-out prompts are spoken at every evaluation."""
    listen: int = Field(4, ge=0)
    """How many."""
    evaluations: int = Field(12, ge=1)
    """Of the held-out samples, evenly over the steps."""
    keep_best: bool = False
    """End with the weights of the best evaluation, and not of the last step."""

    @field_validator("shards", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        each = given if isinstance(given, list) else [given]
        return [{"path": one} if isinstance(one, (str, Path)) else one for one in each]

    @model_validator(mode="after")
    def _follow_size(self) -> TrainConfig:
        rule, model = SIZES[self.size], self.model
        if self.start is not None and (shape := self.model.model_fields_set - {"kind", "attention"}):
            raise ValueError(f"model.{min(shape)} is set, but start gives a model with a shape of its own")
        if self.start is None and self.trained in ("adapter", "audio_ffn"):
            raise ValueError(f"trained is {self.trained!r}: give start, the model whose other weights stay")
        if 0 < sum(source.weight is not None for source in self.shards) < len(self.shards):
            raise ValueError("give every one of the shards a weight, or none")
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        self.max_tokens = self.max_tokens or rule.max_tokens
        self.max_length = self.max_length or self.max_tokens
        if self.max_length > self.max_tokens:
            raise ValueError(
                f"max_length {self.max_length} is more than a pack holds: max_tokens {self.max_tokens}"
            )
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

    @property
    def weights(self) -> list[float] | None:
        """Of the sources; None: by their sizes."""
        given = [source.weight for source in self.shards if source.weight is not None]
        return given or None


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
    activations = min(batch * length, chosen(config.max_tokens)) * wide * 4
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
    all_ranks=True,
)
