"""Settings of the stage `evaluate_thoughts`. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from audiollm.data.records.video_clips import PictureSettings
from audiollm.recipe.stages import InputModel, InputPath, StageConfig
from pipelines.audiocot.writer.scores import QuestionKind


class EvaluateThoughtsConfig(StageConfig):
    """Settings of the stage `evaluate_thoughts`."""

    model: InputModel
    """A model that writes: a folder in Hugging Face layout, or that of the stage that trained it."""
    samples: InputPath
    """Questions with true answers: `thinking.jsonl` of the stage `audiocot`."""
    pictures: PictureSettings | None = None
    """How the pictures of videos are shown; null: as in the model's training, which its `pictures.json` tells. Where
    it tells nothing, the samples must have no videos."""
    split: Literal["test", "train"] | None = "test"
    """Ask about clips that no training learns from (`test`, also where they are called `validation` or the like), or
    about those that one does; null: about all."""
    questions: list[QuestionKind] = Field(["clip", "region", "instruction"], min_length=1)
    """Kinds of questions that are asked."""
    exchange: list[Literal["video", "sound"]] = Field(default=[])
    """Control: parts of each question that are replaced by those of another clip's question of the same kind."""
    shuffle_frames: bool = False
    """Control: show the pictures of each video in random order."""
    max_questions: int = Field(300, ge=1)
    """Most questions of each kind, drawn by their ids."""
    max_answer_tokens: int = Field(1024, ge=16)
    """Tokens after which an answer is cut; `audiollm think` has the same limit."""
    batch_size: int = Field(16, ge=1)
    """Questions that are answered at a time."""
    examples: int = Field(12, ge=0)
    """Answers of the report that are shown with their sound, the worst first."""
    seed: int = 0
    """Seed of the order of shuffled pictures."""
