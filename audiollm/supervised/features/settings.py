"""Settings of the stage `encode_features`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from audiollm.data.hearing.augmentation import Augmentation
from audiollm.recipe.stages import InputSource, StageConfig
from audiollm.train.settings import Precision
from audiollm.train.supervised_settings import AudioEncoderSettings


class EncodeFeaturesConfig(StageConfig):
    """Settings of `encode_features`."""

    samples: InputSource
    """Samples with recordings: a .jsonl, or shards, whose codes go along."""
    audio_encoder: AudioEncoderSettings
    """The encoder, as `shape.audio_encoder` of the trainings has it: with a `path`, and `trained: false`."""
    views: int = Field(0, ge=0, le=64)
    """Augmented views of each training recording, beside the recording as it is; trainings with `augment` draw one."""
    augment: Augmentation | None = None
    """How views differ from the recording."""
    seed: int = 0
    """Of the views."""
    precision: Precision = "auto"
    """Of the encoder's products."""
    dtype: Literal["float16", "float32"] = "float16"
    """In which rows are kept: a row of Whisper base is 1 KiB at a stride of 1 in float16, an hour 176 MiB."""
    samples_per_shard: int = Field(256, ge=1)
    """Most samples of a shard."""

    @model_validator(mode="after")
    def _check_sources(self) -> EncodeFeaturesConfig:
        if self.audio_encoder.path is None or self.audio_encoder.trained:
            raise ValueError("audio_encoder needs a path and trained: false: rows are made once, and stay")
        if (self.views > 0) != (self.augment is not None):
            raise ValueError("views and augment go together: set both, or none")
        return self
