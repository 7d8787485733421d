"""Settings of the built-in rewards. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from audiollm.data.text.languages import language_code

Match = Literal["auto", "exact", "letter", "text", "number", "math"]
ReadForm = Literal["prompt", "tags", "boxed", "free"]
StepSplit = Literal["sentences", "lines", "numbered"]


class RewardSettings(BaseModel):
    """Base of all rewards' settings. A reward without settings of its own takes this class."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class AccuracySettings(RewardSettings):
    """Settings of `accuracy`."""

    match: Match = "auto"
    """How answer and key are compared. `auto`: `letter` where the question has options, else `number` where the key
    is one, else `text`."""
    tolerance: float = Field(1e-6, ge=0)
    """Largest relative error of a right number (`number`, `math`)."""
    form: ReadForm = "prompt"
    """Where the answer stands. `prompt`: where the prompt wants it, which is `tags` (the first `<answer>...</answer>`),
    `boxed` (the last `\\boxed{...}`) or `free` (the text, with or without tags). An answer in another form is wrong."""


class FormatSettings(RewardSettings):
    """Settings of `format`."""

    think: bool = True
    """The form has a thought; False: `<answer>...</answer>` alone."""


class ThinkSettings(RewardSettings):
    """Settings of `think`."""

    max_words: int = Field(50, ge=1)
    """Longest thought, in words."""


class CosineSettings(RewardSettings):
    """Settings of `cosine`."""

    max_tokens: int = Field(256, ge=1)
    """Length of an answer at which the value is that of the longest."""
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    match: Match = "auto"
    """How answer and key are compared: see `accuracy`."""
    form: ReadForm = "prompt"
    """Where the answer stands: see `accuracy`."""


class RepetitionSettings(RewardSettings):
    """Settings of `repetition`."""

    ngram: int = Field(3, ge=1)
    """Words of an n-gram."""
    max_penalty: float = Field(-1.0, le=0)
    """Value of an answer that repeats one n-gram without end."""


class LanguageSettings(RewardSettings):
    """Settings of `language`."""

    language: str | None = None
    """Language of a right reply, as in `ru`; None: the sample's `metadata.language`, else that of its question."""

    @field_validator("language")
    @classmethod
    def _is_a_language(cls, language: str | None) -> str | None:
        if language is not None and language_code(language) is None:
            raise ValueError(f"{language!r} is no language: give a code such as en, de or ru")
        return language


class StepsSettings(RewardSettings):
    """Settings of `steps`."""

    keys: tuple[str, ...] = ("heard",)
    """Keys of the metadata whose values (texts or lists of texts) can be heard in the recording."""
    answer: bool = False
    """The right answer can be heard, too: a step that names it counts."""
    names: tuple[str, ...] = ()
    """All that may be heard in any recording. With these a step's score is the share of the names in it that are right;
    without, a thought that lists every name scores as well as one that listens."""
    split: StepSplit = "sentences"
    """Parts of the thought that are steps: `sentences` and lines, `lines` alone, or `numbered` items (`1.`, `Step 2:`),
    each with the lines behind it."""


class ModelSettings(RewardSettings):
    """Settings of `reward_model`."""

    folder: Path
    """Folder of a `train_reward` stage, or its `model`."""
    device: str = "auto"
    """`auto`: that of the training rank, or of the actor; or another by name (`cpu`, `cuda`)."""


class StepModelSettings(ModelSettings):
    """Settings of `step_model`."""

    split: StepSplit = "sentences"
    """Parts of the thought that are steps: see `steps`."""


class OverlongSettings(RewardSettings):
    """Settings of `overlong`."""

    buffer: int = Field(16, ge=1)
    """Tokens or frames before the limit over which the penalty falls to -1."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest text of an answer, in tokens; None: text has no penalty."""
    max_frames: int | None = Field(None, ge=1)
    """Longest speech of an answer, in code frames; None: speech has no penalty."""

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongSettings:
        limits = [limit for limit in (self.max_tokens, self.max_frames) if limit is not None]
        if not limits:
            raise ValueError("max_tokens or max_frames must be given")
        if self.buffer > min(limits):
            raise ValueError(f"buffer must be at most the limit of an answer, {min(limits)}")
        return self


VERDICTS = "verdicts"
"""Folder of a judge's verdicts in that of a stage."""


class JudgeSettings(RewardSettings):
    """Settings of `judge`."""

    endpoint: str
    """Address of an OpenAI-compatible endpoint, for example http://localhost:8000/v1."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    prompt: str = (
        "Question: {question}\nRight answer: {key}\nGiven answer: {answer}\n"
        "How good is the given answer? Reply with one line: Score: N, with N from 0 to 10."
    )
    """Request to the judge; `{question}`, `{key}` and `{answer}` are filled in."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for one reply; `timeout_s` of the reward is that for the whole batch."""
    attempts: int = Field(3, ge=1)
    together: int = Field(8, ge=1)
    """Most requests at a time."""
    store: Path | None = None
    """File of verdicts: what was judged once is not asked again. None: `verdicts` in the stage's folder."""


POCKETSPHINX = "pocketsphinx"
"""The recognizer that needs no folder."""


class WordsSettings(RewardSettings):
    """Settings of `words`."""

    recognizer: str | list[str] = POCKETSPHINX
    """`pocketsphinx`, a recognizer's folder as `annotate` takes it (`faster_whisper=FOLDER`), an import path, or
    `model=FOLDER`: a model that was trained on the task `asr`. A list: the mean of what they score, which is harder to
    please than one of them."""
    language: str = "en"
    """Language of the recognizer, and of samples that name none (`metadata.language`)."""
    form: str = "whisper"
    """How texts are compared: see `evaluate tts --form`."""
    texts: Path | None = None
    """A .jsonl of samples, for `pocketsphinx`: where their texts are few, it chooses among these, which is faster and
    surer; null: any words of its language model."""

    @field_validator("recognizer")
    @classmethod
    def _check_recognizers(cls, recognizer: str | list[str]) -> str | list[str]:
        if isinstance(recognizer, list) and len(set(recognizer)) < max(1, len(recognizer)):
            raise ValueError("give each recognizer once, and at least one")
        return recognizer

    @property
    def recognizers(self) -> list[str]:
        """All of them."""
        return [self.recognizer] if isinstance(self.recognizer, str) else self.recognizer


class VoiceSettings(RewardSettings):
    """Settings of `voice`."""

    judge: str
    """Folder of a speaker model, or an import path."""


class LengthSettings(RewardSettings):
    """Settings of `length`."""

    words_per_second: float = Field(2.5, gt=0)
    """Usual rate of speech; the wanted duration is the text's words over it."""
    tolerance: float = Field(0.5, gt=0)
    """Relative deviation of the duration at which the value is 0."""
