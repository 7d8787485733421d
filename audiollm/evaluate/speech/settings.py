"""Settings of the stage `evaluate`: independent judges score generated and real audio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from audiollm.recipe.stages import InputModel, InputPath, StageConfig

POCKETSPHINX = "pocketsphinx"


class EvaluationConfig(StageConfig):
    audio: InputPath
    """The clips to judge: `generated.jsonl` of the stage generate."""
    samples: InputPath
    """`samples.jsonl` of the stage compose: its training clips train the judges, its test clips are the reference."""
    suite: Literal["tts"] = "tts"
    """The suite. tts: is the requested text heard, in the requested voice?"""
    reference_audio: InputPath | None = None
    """JSONL of the form of `audio`: real test clips through the codec alone. They show its share of the errors."""
    model: InputModel | None = None
    """The model that spoke the clips. The result then says where the recognizer's weights also taught it."""
    recognizer: InputModel | None = None
    """The recognizer that hears the words: a folder of transformers (Whisper, CTC) or of CTranslate2, or its name on
    the hub. Not the one whose transcripts the model learned. None: Pocketsphinx (English)."""
    judge_steps: int = Field(default=400, ge=1)
    """Training steps of each trained judge."""
    judge_clips: int = Field(default=3000, ge=2)
    """Most training clips for each judge (a seeded choice, equally many of each label)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the judges' training; by default the recipe's."""
    workers: int = Field(default=2, ge=1)
    """Judges trained in parallel, each in one thread; the trained judges do not depend on it."""


def words_prefix(recognizer: str) -> str:
    """Prefix of the figures of a stage's recognizer: `pocketsphinx_`, or `recognizer_` of any other."""
    return f"{POCKETSPHINX if recognizer == POCKETSPHINX else 'recognizer'}_"
