"""The stage `generate`: its settings and plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from audiollm.recipe.stages import InputModel, InputPath, StageConfig


class GenerateConfig(StageConfig):
    """Settings of `generate`."""

    model: InputModel
    """The model that speaks."""
    codec: InputModel | None = None
    """None: the codec of the model itself, or the `train_tokenizer` of its run."""
    samples: InputPath
    """The samples whose prompts are spoken. Where one answers in words and speech in turn, so does the model."""
    prompts: Literal["test", "train"] = "test"
    """The split whose distinct (text, speaker) pairs are spoken."""
    takes: int = Field(3, ge=1)
    """Times each pair is spoken, each with a seed of its own."""
    max_prompts: int = Field(60, ge=1)
    """Most pairs, picked evenly."""
    batch_size: int = Field(60, ge=1)
    """Clips that are made side by side."""
    max_duration_s: float = Field(30.0, gt=0)
    """Longest speech; the limit follows the training clips where those are shorter."""
    temperature: float | None = Field(None, ge=0)
    """0 takes the most likely code. None: the model's setting (generation_config.json), else 0.7."""
    top_k: int | None = Field(None, ge=0)
    """Keep the k most likely codes, 0 keeps all. None: the model's setting, else 0."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Keep the smallest set of codes with this probability. None: the model's setting, else 0.9."""
    ras_window: int | None = Field(None, ge=0)
    """Frames that repetition-aware sampling looks back (Higgs Audio V2: 7). None: the model's setting, else 0 (off)."""
    text_guidance: float | None = Field(None, ge=0)
    """Classifier-free guidance on the text, 1 is none. None: 3 where training hid the text at times, else 1."""
    speaker_guidance: float | None = Field(None, ge=0)
    """Classifier-free guidance on the speaker. None: 2 where training hid the speaker at times, else 1."""
    seed: int = 0
    """Seed of the draws; each sample and take has one of its own from it."""
