"""Settings of the stages `encode_latents`, `train_flow`, `generate_sound` and `edit_sounds`. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from audiollm.recipe.stages import InputModel, InputPath, InputSource, StageConfig, required
from audiollm.train.settings import ModelTrainingConfig, OptimizerSettings, TrainingConfig


class EncodersConfig(BaseModel):
    """Pretrained encoders of conditions; a modality without one is encoded by a small one that is trained along."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    caption: InputSource | None = None
    """A CLIP-class model's folder, or an import path."""
    cot: InputSource | None = None
    """A T5-class model's folder, or an import path."""
    frames: InputSource | None = None
    """A CLIP-class model's folder, or an import path."""
    sync: InputSource | None = None
    """The import path of a Synchformer-class encoder."""
    pads: bool = False
    """Texts are encoded with their pads, as the released ThinkSound takes them."""


class PicturesConfig(BaseModel):
    """Pictures for encoders that are trained along, and the rate of frames for pretrained ones."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    frame_rate: float = Field(8.0, gt=0)
    """Frames per second."""
    frame_side: int = Field(64, ge=16, multiple_of=16)
    """Side of a frame in pixels."""
    sync_rate: float = Field(25.0, ge=0)
    """Pictures per second for synchronisation; 0: none."""
    sync_side: int = Field(32, ge=16, multiple_of=16)
    """Side of these pictures in pixels."""


class EncodeLatentsConfig(StageConfig):
    """Settings of `encode_latents`."""

    samples: InputPath
    """Sound samples (.jsonl): the wanted sound is the assistant's, words, video and input track are the user's."""
    autoencoder: InputSource
    """The folder of a stage that made one (`train_vae`, `fit_mel_pca`), or a published one by import path."""
    encoders: EncodersConfig = EncodersConfig()
    """Pretrained encoders of conditions; a modality without one is encoded by a small one that is trained along."""
    pictures: PicturesConfig = PicturesConfig()
    """How pictures of videos are kept for encoders that are trained along."""
    edits_per_sample: int = Field(0, ge=0, le=12)
    """Edits (a sound added, removed, extracted) made of each sample whose `metadata.events` have solo tracks."""
    samples_per_shard: int = Field(256, ge=1)
    """Most samples of a shard."""

    @model_validator(mode="after")
    def _check_sync(self) -> EncodeLatentsConfig:
        if self.encoders.sync is not None and not self.pictures.sync_rate:
            raise ValueError(
                "encoders.sync sees no pictures at pictures.sync_rate: 0: give a rate, or leave it out"
            )
        return self


class LatentsConfig(BaseModel):
    """One source of encoded sounds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    path: InputPath
    """The shards of an `encode_latents` stage."""
    weight: float | None = Field(None, ge=0)
    """Share of this source in the samples of a step, relative to the other sources; None: by its number of samples."""


def _as_list(value: Any) -> Any:
    """One path, or a list of paths and of `{path, weight}`."""
    listed = value if isinstance(value, list) else [value]
    return [entry if isinstance(entry, dict | LatentsConfig) else {"path": entry} for entry in listed]


class FlowSizeRule(NamedTuple):
    """The settings that follow from the size."""

    hidden_size: int
    num_heads: int
    multi_stream_blocks: int
    single_stream_blocks: int
    encoder_width: int
    batch_size: int
    steps: int
    learning_rate: float


SIZES: dict[str, FlowSizeRule] = {
    "tiny": FlowSizeRule(128, 4, 2, 4, 64, 16, 2_500, 5e-4),
    "small": FlowSizeRule(448, 7, 4, 8, 256, 64, 100_000, 2e-4),
    "300m": FlowSizeRule(768, 12, 5, 9, 512, 256, 300_000, 1e-4),
    "1b": FlowSizeRule(1024, 16, 7, 14, 512, 256, 300_000, 5e-5),
    "3b": FlowSizeRule(1536, 12, 10, 20, 512, 512, 400_000, 5e-5),
}
"""`1b` is the published shape."""


class TimeDensityConfig(BaseModel):
    """The density of times in training."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    name: Literal["logit_normal", "uniform", "shifted"] = "logit_normal"
    """`logit_normal`, `uniform`, or `shifted`: uniform, moved towards noise the longer a sound is."""
    mean: float = -1.5
    """Mean of the normal distribution of `logit_normal`; below 0: nearer to noise, where the conditions decide."""
    deviation: float = Field(1.2, gt=0)
    """Deviation of the normal distribution of `logit_normal`."""
    base_latents: int = Field(194, ge=1)
    """The length that `shifted` does not move."""


class ContextConfig(BaseModel):
    """Shares of what is hidden of the wanted sound in training, for editing."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    everything: float = Field(0.5, ge=0)
    """All is hidden: the sound is made from the conditions alone."""
    nothing: float = Field(0.05, ge=0)
    """All is shown."""
    spans: float = Field(0.25, ge=0)
    """Spans are hidden, the rest is kept (inpainting)."""
    end: float = Field(0.2, ge=0)
    """The end is hidden (extending)."""
    pair: float = Field(0.8, ge=0, le=1)
    """Share of the samples with an input track that are trained as edits of it."""

    @model_validator(mode="after")
    def _check(self) -> ContextConfig:
        if self.everything + self.nothing + self.spans + self.end <= 0:
            raise ValueError("context: one of the shares must be above 0")
        return self


class TrainFlowConfig(OptimizerSettings, TrainingConfig):
    """Settings of `train_flow`."""

    incidental: ClassVar[frozenset[str]] = ModelTrainingConfig.incidental | {"autoencoder", "eval_sounds"}

    samples: Annotated[list[LatentsConfig], BeforeValidator(_as_list), Field(min_length=1)]
    """Encoded sounds: a path, or a list of paths and of `{path, weight}`."""
    preset: Literal["native", "thinksound"] = "native"
    """`native`, or the released structure with its pads and nulls."""
    start: InputModel | None = None
    """A trained model to go on from, in its own shape; for `thinksound` also a folder with the released weights as
    safetensors."""
    hidden_size: int | None = Field(None, ge=32)
    """Width; None: by the size."""
    num_heads: int | None = Field(None, ge=1)
    """Attention heads; None: by the size."""
    multi_stream_blocks: int | None = Field(None, ge=1)
    """Blocks in which sound and conditions have weights of their own; None: by the size."""
    single_stream_blocks: int | None = Field(None, ge=1)
    """Blocks in which both share their weights; None: by the size."""
    encoder_width: int | None = Field(None, ge=32, multiple_of=32)
    """Width of the encoders that are trained along."""
    estimate_variance: float = Field(0.05, gt=0, exclude_if=lambda value: value == 0.05)
    """Variance that is left of normalized latents when all is known that can be: 0.05 for those of `train_vae`, 0.35
    for those of `fit_mel_pca`, which hold the texture of noise."""
    gated_fusion: bool = True
    """Frames are added to the latents through a gate between the two kinds of blocks."""
    audio_context: bool = True
    """The model takes existing sound, for editing."""
    context: ContextConfig = ContextConfig()
    """What is hidden of the wanted sound in training, so that the model learns to edit."""
    time: TimeDensityConfig = TimeDensityConfig()
    """How the times of the flow are drawn in training."""
    dropout: float = Field(0.2, ge=0, lt=1)
    """Probability that a modality is hidden, each by itself."""
    dropout_video: float | None = Field(None, ge=0, lt=1)
    """Probability that frames and sync are hidden together, as where there is no video: what words say is learned
    where pictures do not say it. None: 0.2, and 0 where `dropout` is 0."""
    dropout_words: float | None = Field(None, ge=0, lt=1)
    """Probability that caption and CoT are hidden together, as where nothing is said: what pictures show is learned
    where words do not say it. None: 0.2, and 0 where `dropout` is 0."""
    dropout_together: float = Field(0.1, ge=0, lt=1)
    """Probability that all are hidden together, for guidance."""
    window_s: float | None = Field(None, gt=0)
    """Longer sounds are trained on random windows of this length; None: sounds are trained whole."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights that the run ends with; 0: no averaging."""
    max_eval_samples: int = Field(64, ge=1)
    """Held-out samples (metadata `split: test`) that the loss is measured on at each evaluation."""
    autoencoder: InputSource | None = None
    """The autoencoder of the latents: with it held-out sounds are made at each evaluation, to be heard in the report,
    in the studio and in TensorBoard."""
    eval_sounds: int = Field(4, ge=0)
    """Held-out samples whose sounds are made at each evaluation, where `autoencoder` is given."""

    @model_validator(mode="after")
    def _follow_dropout(self) -> TrainFlowConfig:
        for name in ("dropout_video", "dropout_words"):
            if getattr(self, name) is None:
                setattr(self, name, 0.2 if self.dropout else 0.0)
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> TrainFlowConfig:
        if self.strategy in ("zero2", "zero3"):
            raise ValueError(
                f"strategy: {self.strategy} mixes up the gradients of processes whose samples have different "
                "modalities: take fsdp2"
            )
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> TrainFlowConfig:
        native_settings = ("gated_fusion", "audio_context", "estimate_variance")
        refused_settings = [
            name for name in native_settings if name in self.model_fields_set and getattr(self, name)
        ]
        if self.preset == "thinksound" and refused_settings:
            raise ValueError(
                f"{', '.join(refused_settings)}: preset thinksound has none: leave it out, or train preset native"
            )
        return self

    @model_validator(mode="after")
    def _follow_size(self) -> TrainFlowConfig:
        rule = SIZES[self.size]
        self.follow_size(rule.steps, None, rule.batch_size, rule.learning_rate)
        for name in (
            "hidden_size",
            "num_heads",
            "multi_stream_blocks",
            "single_stream_blocks",
            "encoder_width",
        ):
            setattr(self, name, getattr(self, name) or getattr(rule, name))
        width, heads = required(self.hidden_size), required(self.num_heads)
        if width % heads or (width // heads) % 2:
            raise ValueError(
                f"hidden_size {width} with num_heads {heads}: the width of a head, hidden_size / num_heads, must be an "
                "even number"
            )
        return self


class SoundSamplingConfig(BaseModel):
    """How sounds are sampled."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    steps: int = Field(24, ge=1)
    solver: Literal["euler", "midpoint", "heun"] = "euler"
    """`midpoint` and `heun` evaluate the model twice per step."""
    schedule: Literal["uniform", "cosine", "shifted"] = "uniform"
    """Times of the steps: `cosine` is dense at noise, `shifted` the denser there the longer a sound is."""
    guidance: float = Field(4.5, ge=0, allow_inf_nan=False)
    """Scale of all conditions together; 1: no guidance."""
    guidance_by: dict[
        Literal["frames", "sync", "caption", "cot"], Annotated[float, Field(ge=0, allow_inf_nan=False)]
    ] = Field(default_factory=dict)
    """Scale of each modality in this order, in place of `guidance`."""
    guide_context: bool = False
    """Existing sound is left out of the unconditional branch."""
    guidance_rescale: float = Field(0.7, ge=0, le=1)
    """Share of the guided estimate that has the deviation of the one without guidance; 0: guidance makes sounds
    louder."""


class GenerateSoundConfig(StageConfig):
    """Settings of `generate_sound`."""

    model: InputModel
    """A `train_flow` stage's folder."""
    autoencoder: InputSource
    """The autoencoder whose latents the model was trained on."""
    samples: InputPath
    """Sound samples (.jsonl) whose conditions are used."""
    split: Literal["test", "train", "all"] = "test"
    """The samples for which sounds are made, by `metadata.split`."""
    conditions: list[Literal["frames", "sync", "caption", "cot"]] | None = None
    """The modalities that are used of those that a sample has; None: all."""
    edit: bool = True
    """Samples with an input track are made as edits of it; False: their track is left out."""
    sampling: SoundSamplingConfig = SoundSamplingConfig()
    """How sounds are sampled."""
    duration_s: float | None = Field(None, gt=0)
    """Length of the sounds; None: that of the sample's own sound or video. An edit is as long as its track."""
    max_samples: int = Field(100, ge=1)
    """Most samples, picked evenly."""
    takes: int = Field(1, ge=1)
    """Sounds for each sample, each with a seed of its own."""
    batch_size: int = Field(16, ge=1)
    """Sounds that are sampled together, where they have one length."""
    seed: int = 0
    """Seed of the noise."""


class EditSoundsConfig(StageConfig):
    """Settings of `edit_sounds`."""

    model: InputModel
    """A `train_flow` stage's folder."""
    autoencoder: InputSource
    """The autoencoder whose latents the model was trained on."""
    samples: InputPath
    """Scenes (.jsonl) whose `metadata.events` have solo tracks, as `compose_scenes` makes them."""
    split: Literal["test", "train", "all"] = "test"
    """The scenes that are edited, by `metadata.split`."""
    operations: list[Literal["extend", "inpaint", "add", "remove"]] = Field(
        ["extend", "inpaint", "add", "remove"], min_length=1
    )
    """Edits that are made of each scene."""
    by: list[Literal["words", "object"]] = Field(["words"], min_length=1)
    """How `add` and `remove` are told the sound: by its words, or by the region of its object in the video alone."""
    sampling: SoundSamplingConfig = SoundSamplingConfig()
    """How the edited span is sampled."""
    margin_s: float = Field(0.1, ge=0)
    """The span is longer than the sound by this at each end."""
    max_samples: int = Field(20, ge=1)
    """Most scenes, picked evenly; one sound of each is edited, by every operation."""
    seed: int = 0
    """Seed of the edits and of the noise."""
