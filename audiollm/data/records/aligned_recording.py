"""Recordings with their translations, aligned or not: the records from which streams of an interpreter are composed."""

from __future__ import annotations

import unicodedata
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SpokenSpan(BaseModel):
    """A span of a recording in which a piece of the translation is spoken."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    path: str = Field(min_length=1)
    start_s: float = Field(0.0, ge=0)
    end_s: float = Field(gt=0)


class SourceWord(BaseModel):
    """A word with its times, in seconds."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    text: str
    start_s: float = Field(ge=0)
    end_s: float = Field(ge=0)


class SourceSegment(SourceWord):
    """A segment of the source with its translation."""

    target: str
    speaker: str | None = None
    due_s: float | None = Field(None, ge=0)
    """Time at which the translation is due, where this is not the end of the segment."""
    said: SpokenSpan | None = None
    """The translation as it is spoken."""


class AlignedRecording(BaseModel):
    """A recording with its translation: aligned by segments, or to be aligned with the words of the source."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(min_length=1)
    audio: str = Field(min_length=1)
    segments: list[SourceSegment] = []
    """Segments in order of their beginnings; those of several speakers may overlap."""
    words: list[SourceWord] = []
    """Words of the source, for `wait_k`."""
    text: str = ""
    """Transcript of the source, for an aligner."""
    target: str = ""
    """Translation of the whole recording, for `wait_k` and aligners."""
    target_ends_s: list[float] = []
    """For each of `target_units(target)`, the time at which the source that it needs is over; empty: not aligned."""
    target_audio: str | None = None
    """Recording of the whole translation."""
    target_words: list[SourceWord] = []
    """The words of the translation with their times in `target_audio`."""
    speaker: str | None = None
    """Speaker of the source where there are no segments."""
    split: str | None = None

    @model_validator(mode="after")
    def _has_the_recording_of_its_words(self) -> Self:
        if self.target_words and self.target_audio is None:
            raise ValueError("target_words are times in target_audio, which is not named")
        return self


class TargetUnit(NamedTuple):
    """A word of a translation, or a character of a script without spaces."""

    text: str
    start: int
    """Place of its first character in the text."""
    is_glued: bool
    """Whether it follows the unit before without a space."""


def target_units(text: str) -> list[TargetUnit]:
    """Divide a text into words; in scripts without spaces (Chinese, Japanese, Thai, ...) into characters.

    Punctuation belongs to the unit before it.
    """
    units: list[TargetUnit] = []
    after_space = True
    for place, character in enumerate(text):
        if character.isspace():
            after_space = True
            continue
        belongs = bool(units) and not after_space and _belongs(units[-1].text, character)
        if belongs:
            units[-1] = units[-1]._replace(text=units[-1].text + character)
        else:
            units.append(TargetUnit(character, place, bool(units) and not after_space))
        after_space = False
    return units


def _belongs(unit: str, character: str) -> bool:
    """Return whether a character goes on with the unit before it."""
    if unicodedata.category(character)[0] in "PM":
        return True
    return not _is_spaceless(character) and not _is_spaceless(unit[-1])


def _is_spaceless(character: str) -> bool:
    """Return whether a character's script is written without spaces between words."""
    return any(first <= ord(character) <= last for first, last in _SPACELESS)


_SPACELESS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x9FFF),  # Chinese and Japanese, with their punctuation
    (0xF900, 0xFAFF),
    (0xFF01, 0xFF60),  # wide forms
    (0x20000, 0x3FFFF),
)
