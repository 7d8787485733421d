"""Settings of the stage `train`, and the rules of `size`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.records.storage import is_url
from audiollm.recipe.stages import InputModel, InputPath, check_input, from_hub
from audiollm.train.settings import LoopSettings, ModelTrainingConfig, PromptMix


def _check_source(address: str, info: ValidationInfo) -> str:
    return address if is_url(address) else str(check_input(Path(address), info))


SourceAddress = Annotated[str, AfterValidator(_check_source)]


@dataclass(frozen=True)
class DecoderSizeRule:
    """The settings that follow from `size`. Heads are 64 wide."""

    hidden_size: int
    num_layers: int
    batch_size: int
    steps: int | None
    passes: float | None
    learning_rate: float
    vocab_size: int
    max_tokens: int


SIZES: dict[str, DecoderSizeRule] = {
    "tiny": DecoderSizeRule(192, 6, 48, None, 24, 2e-3, 1_024, 8_192),
    "small": DecoderSizeRule(512, 12, 64, 20_000, None, 6e-4, 8_192, 8_192),
    "300m": DecoderSizeRule(1024, 16, 256, 100_000, None, 3e-4, 32_768, 16_384),
    "1b": DecoderSizeRule(2048, 16, 512, 250_000, None, 2e-4, 128_256, 16_384),
    "3b": DecoderSizeRule(3072, 28, 512, 500_000, None, 1.5e-4, 128_256, 8_192),
}


class AudioEncoderSettings(BaseModel):
    """The encoder of `audio_in: features`: a published one, or one from scratch, whose size follows the model's."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    path: InputModel | None = None
    """A folder with a Whisper, or a model that has such an encoder (config.json, safetensors); None: from scratch."""
    trained: bool = True
    """Otherwise the encoder stays as it is, and its projector alone is trained."""
    hidden_size: int | None = Field(None, ge=8)
    num_layers: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=8)
    num_mel_bins: int | None = Field(None, ge=8)
    window_s: float | None = Field(None, gt=0, le=30)
    """Longer clips are cut into such windows; None: 30 s, or as published."""
    padded: bool | Literal["auto"] | None = None
    """Windows are filled up with silence. None: those of a published encoder, which was trained so. `auto`: these, too,
    but for encoders that were measured to lose no words without it (Whisper tiny and base)."""
    stem: Literal["conv1d", "conv2d"] = "conv1d"
    """The layers that turn mel frames into positions: Whisper's convolutions over time (50 per second), or 2-D ones
    (12.5 per second), which learn from few recordings. Published encoders have `conv1d`."""
    stem_channels: int | None = Field(None, ge=8)
    """Channels of the first block of `conv2d` (later ones have more); None: 32."""
    stride: int | None = Field(None, ge=1)
    """Positions of the encoder that become one row of the model; None: 2, and 1 for `conv2d`."""
    reduction: Literal["concat", "mean"] = "concat"
    """They are put side by side, or their mean is taken (Qwen2-Audio, Boson)."""
    projector_size: int | None = Field(None, ge=8)
    """Width of a hidden layer between encoder and model; None: one linear layer."""
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_shape(self) -> AudioEncoderSettings:
        shape = {
            "hidden_size", "num_layers", "num_heads", "intermediate_size", "num_mel_bins", "stem", "stem_channels",
        }  # fmt: skip
        if self.path is not None and (shape_settings := shape & self.model_fields_set):
            raise ValueError(
                f"{min(shape_settings)} is set, but path gives an encoder with a shape of its own"
            )
        if self.stem != "conv2d" and self.stem_channels is not None:
            raise ValueError("stem_channels is set, but stem is conv1d, which is as wide as the encoder")
        return self


class ShapeConfig(BaseModel):
    """The shape of a model from scratch. What is None follows from `size`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    kind: Literal["dual_ffn"] = "dual_ffn"
    hidden_size: int | None = Field(None, ge=16)
    num_layers: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=16)
    dropout: float = Field(0.1, ge=0, lt=1)
    sliding_window: int | None = Field(None, ge=1)
    """Positions that each one sees, in a model from `start`, too; None: all before it, or as `start` has it."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers that see no further than `sliding_window`, counted from 0, while the others see all; None: all layers.
    A short one in the first layer alone joins what lies side by side, a word and the codes after it, sooner."""
    audio_ffn_layers: tuple[int, ...] | None = None
    """Layers with norms and a feed-forward of their own for audio, counted from 0; None: all."""
    audio_encoder: AudioEncoderSettings | None = None
    """The audio encoder, for `audio_in: features`; None: one from scratch, or that of `start`."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head (Qwen3): attention gets sharp sooner."""
    code_embeddings: Literal["codes", "latents"] = Field("codes", exclude_if=lambda value: value == "codes")
    """How the embeddings of codes begin, where the shards have the codec's code vectors. `codes`: those of each
    codebook by a projection of its own, all at one size, beside a random part. `latents`: the embeddings of a frame add
    up to a projection of the codec's latent, and nothing else: what is heard is learned in fewer steps."""
    code_heads: Literal["random", "embeddings"] = "random"
    """How the heads of the codes begin; as their embeddings, where the model is to repeat codes that it is given."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """The kernel that computes attention in training; `auto`: flash-attn or torch's own on a GPU in half precision."""

    @property
    def model_type(self) -> str:
        """The `model_type` of the family that makes a model of this shape."""
        return f"audiollm_{self.kind}"


class SourceConfig(BaseModel):
    """One source of samples."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    path: SourceAddress
    """A folder of shards, or a .jsonl of samples (recordings in it need `audio_in: features`, or files of codes); here,
    or at any fsspec URL."""
    weight: float | None = Field(None, ge=0)
    """Its share of the samples of a step, relative to the others'; None: as many as it has."""
    augment: Augmentation | None = None
    """Augmentation of this source, in place of the stage's `augment`."""


class SourceSettings(LoopSettings):
    """The training data, and the model to start from."""

    samples: list[SourceConfig] = Field(min_length=1)
    """A path, or a list of paths and of `{path, weight}`; an entry whose path is null is left out."""
    shape: ShapeConfig = ShapeConfig()
    """Of a model from scratch; what is not given is by the size."""
    start: InputModel | None = None
    """A folder to begin from, with its vocabulary: a trained model's, Higgs Audio V2's (transformers' or Boson's
    files), or a plain Llama's or Qwen's, whose vocabulary grows by the special tokens; or a published audio LLM of
    transformers, which learns the last turns of conversations (learning rate, where none is set: 1e-5, of an adapter
    1e-4). None: from scratch."""
    text_tokenizer: Annotated[InputPath, from_hub("tokenizer")] | None = None
    """A folder with a `tokenizer.json` that has the special tokens; None: one is trained on the texts."""
    audio_in: Literal["codes", "features"] = "codes"
    """Recordings are given to the model as codes, or as features through an audio encoder, which needs no codes."""
    augment: Augmentation | None = None
    """How what is heard is varied in training (`audio_in: features`): `{}`, or `{shift: 1, ...}`; None: not at all."""

    @field_validator("samples", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        entries = [{"path": item} if isinstance(item, (str, Path)) else item for item in items]
        return [
            entry
            for entry in entries
            if not isinstance(entry, dict) or entry.get("path", "missing") is not None
        ]


class PackingSettings(LoopSettings):
    """How samples are shown, and packed into the steps of a training."""

    max_tokens: int | None = Field(None, ge=64)
    """Positions of a pack, which is what is in memory at a time; a step has as many packs as it takes."""
    max_length: int | None = Field(None, ge=16)
    """Positions of a sample; None: those of a pack."""
    too_long: Literal["cut", "refuse"] = "cut"
    """Longer samples are cut (whole turns are left out, or the end of the first) or refused; counted either way."""
    packing: Literal["packed", "sorted", "in_order"] = "packed"
    """First fit; or samples of similar length together; or one after the other. The objective is the same."""
    normalization: Literal["sequence", "token"] = "sequence"
    """Every sequence counts the same, or every target does. With `sequence` a word of a short answer weighs more
    than one of a long answer: where answers of many lengths fit, drawn ones are shorter than the data's."""
    audio_reduction: Literal["mean", "sum"] = "mean"
    """Over codebooks."""
    text_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the spoken samples whose text is hidden, so that text guidance works."""
    speaker_dropout: float = Field(0.15, ge=0, lt=1)
    """Share of the spoken samples whose speaker is hidden, so that speaker guidance works."""
    corrupt_codes: float = Field(0.16, ge=0, lt=1)
    """Up to this share of a sample's input codes is replaced at random (targets are not)."""
    silence_weight: float = Field(1.0, gt=0, exclude_if=lambda value: value == 1)
    """Weight of the targets that are silences of a stream (`compose_streams`), beside the 1 of other text targets."""


class TrainConfig(PackingSettings, SourceSettings, ModelTrainingConfig):
    """Settings of `train`. What is None follows from `size`."""

    incidental: ClassVar[frozenset[str]] = ModelTrainingConfig.incidental | {
        "workers",
        "pin_memory",
        "eval_audio_samples",
        "codec",
    }

    text_weight: float = Field(0.1, ge=0)
    """Weight of the loss of text targets."""
    audio_weight: float = Field(1.0, ge=0)
    """Weight of the loss of codes."""
    depth_weight: float | None = Field(None, ge=0, exclude_if=lambda value: value is None)
    """Weight of the depth decoder's mean loss beside that of the first codebook, for talkers that have one (CSM,
    Qwen3-TTS); None: as their authors have it (1, 0.3)."""
    prompt_mix: PromptMix | None = Field(None, exclude_if=lambda value: value is None)
    """How often prompts are shown in another form, for talkers that know several (Qwen3-TTS), and earlier turns are
    learned (CSM: learned_turns)."""
    max_codes_mb: float = Field(64, gt=0, exclude_if=lambda value: value == 64)
    """A sample whose codes take more when they are unpacked is set aside; 64 MB are some 11 hours of 8 codebooks."""
    workers: int = Field(0, ge=0)
    """Processes that read and pack ahead; 0: the training process itself."""
    pin_memory: bool = Field(False, exclude_if=lambda value: not value)
    """Batches are copied to the GPU from pinned memory, while it still works on the step before. Needs a GPU."""
    strict: bool = False
    """Stop at the first bad sample; otherwise it is set aside, counted and left out."""
    codec: InputModel | None = None
    """The codec of the shards; with it, held-out prompts are synthesized at every evaluation."""
    eval_audio_samples: int = Field(4, ge=0)
    """Held-out prompts to synthesize at each evaluation; 0: none."""
    evaluations: int = Field(12, ge=1)
    """Evaluations on the held-out samples, evenly over the steps."""
    keep_best: bool = False
    """End with the weights of the best evaluation, and not of the last step: that of the least `audio_loss`, or of the
    least `text_loss` where no held-out sample is spoken or `audio_weight` is 0."""

    _settings_given: frozenset[str] = PrivateAttr(frozenset())

    @property
    def settings_given(self) -> frozenset[str]:
        """Names of the settings that do not follow from `size` or stand at their defaults."""
        return self._settings_given

    @model_validator(mode="after")
    def _follow_size(self) -> TrainConfig:
        self._settings_given = frozenset(self.model_fields_set)
        rule, shape = SIZES[self.size], self.shape
        free = {
            "kind",
            "attention",
            "audio_ffn_layers",
            "audio_encoder",
            "sliding_window",
            "sliding_window_layers",
        }
        set_shape = shape.model_fields_set - free
        if self.start is not None and set_shape:
            raise ValueError(
                f"shape.{min(set_shape)} is set, but start gives a model with a shape of its own"
            )
        if self.start is None and self.trained in ("adapter", "audio_ffn"):
            raise ValueError(f"trained is {self.trained!r}: give start, the model whose other weights stay")
        if shape.audio_encoder is not None and self.audio_in == "codes":
            raise ValueError("shape.audio_encoder is set, but audio_in is codes: set it to features")
        if 0 < sum(source.weight is not None for source in self.samples) < len(self.samples):
            raise ValueError("give every one of the samples a weight, or none")
        if self.audio_in == "codes" and any(self.augmentations):
            raise ValueError("augment is set, but audio_in is codes: set it to features")
        self.follow_size(rule.steps, rule.passes, rule.batch_size, rule.learning_rate)
        self.max_tokens = self.max_tokens or rule.max_tokens
        self.max_length = self.max_length or self.max_tokens
        if self.max_length > self.max_tokens:
            raise ValueError(
                f"max_length {self.max_length} is more than a pack holds: max_tokens {self.max_tokens}"
            )
        hidden = shape.hidden_size or rule.hidden_size
        heads = shape.num_heads or max(1, hidden // 64)
        if hidden % (2 * heads):
            raise ValueError(f"hidden_size {hidden} must be a multiple of 2 x num_heads {heads}")
        layers = shape.num_layers or rule.num_layers
        for name in ("audio_ffn_layers", "sliding_window_layers"):
            chosen_layers = getattr(shape, name) or ()
            strange = [n for n in chosen_layers if not (n >= 0 and (self.start or n < layers))]
            if strange:
                raise ValueError(f"shape.{name}: no layer {strange} among {layers}")
        if shape.sliding_window_layers is not None and shape.sliding_window is None:
            raise ValueError(
                "shape.sliding_window_layers is set, but sliding_window, how far they see, is not"
            )
        filled = {
            "hidden_size": hidden,
            "num_heads": heads,
            "audio_encoder": shape.audio_encoder or self._encoder_from_scratch(),
            "num_layers": layers,
            "intermediate_size": shape.intermediate_size or intermediate_size(hidden),
        }
        self.shape = shape.model_copy(update=filled)
        if shape.attention in ("flash_attn", "varlen") and self.precision == "fp32":
            raise ValueError(
                f"shape.attention {shape.attention!r} needs half precision, and precision is 'fp32': "
                "take auto or sdpa, or precision bf16"
            )
        return self

    def _encoder_from_scratch(self) -> AudioEncoderSettings | None:
        return AudioEncoderSettings() if self.audio_in == "features" and self.start is None else None

    @property
    def freezes_encoder(self) -> bool:
        """See `ModelTrainingConfig.freezes_encoder`."""
        return self.shape.audio_encoder is not None and not self.shape.audio_encoder.trained

    @property
    def augmentations(self) -> tuple[Augmentation | None, ...]:
        """The augmentation of each source."""
        return tuple(source.augment or self.augment for source in self.samples)

    @property
    def weights(self) -> list[float] | None:
        """The weights of the sources; None: by their sizes."""
        weights = [source.weight for source in self.samples if source.weight is not None]
        return weights or None


def intermediate_size(hidden_size: int) -> int:
    """Feed-forward width: 8/3 of the hidden size (SwiGLU), to the next multiple of 64."""
    return -(-hidden_size * 8 // 3 // 64) * 64
