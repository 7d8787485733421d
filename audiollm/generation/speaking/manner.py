"""How a text is to be said: the options of `Generator.speak`, `.stream` and `.dialogue`, declared and checked once.

Shapes: K codebooks, T code frames, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from audiollm.audio import Waveform
from audiollm.errors import ConfigError
from audiollm.generation.engine.defaults import PLAIN
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.voice import Voice

LONGEST_SPEECH_S = 600.0
"""Longest speech that one call makes."""

Recording = str | Path | Waveform
"""A sound file or its samples."""


class TakeOptions(TypedDict, total=False):
    """Options of one take, whoever speaks; `Manner` holds the defaults."""

    scene: str | None
    """Description of place and mood. Default: none."""
    seed: int
    """Seed of the draws: another seed, another take. Default: 0."""
    sampling: SamplingConfig | None
    """How codes are drawn. Default: what is best known for the model (`Generator.defaults`)."""
    max_duration_s: float | None
    """Longest duration of the speech, in (0, 600]. Default: three times what the text should take."""
    language: str | None
    """Language of the text, by whose rules numbers are read. Default: by its script; Latin letters are English."""


class SpeakOptions(TakeOptions, total=False):
    """Options of one take in one voice: a speaker of the training data, a reference, or the model's own choice."""

    speaker: str | None
    """Speaker name that the model was trained on. Excludes `reference`."""
    reference: Recording | Voice | None
    """Recording of the voice to speak with; what exceeds `voice.LONGEST_REFERENCE_S` is cut off."""
    reference_text: str | None
    """Transcript of the reference. It makes the likeness better where the model was trained with transcripts."""


@dataclass(frozen=True)
class Manner:
    """How a text is to be said, with the reference read and encoded.

    Raises:
        ConfigError: a speaker beside a voice, or a duration that is not in (0, `LONGEST_SPEECH_S`].
    """

    speaker: str | None = None
    voice: Voice | None = None
    scene: str | None = None
    seed: int = 0
    sampling: SamplingConfig = PLAIN
    max_duration_s: float | None = None
    """Longest duration of the whole speech; None: derived from the length of the text."""
    chunk_s: float | None = None
    """Longest chunk of a long text; None: `CHUNK_S`, or less where the model was trained on shorter clips."""
    remembered: int | None = None
    """Chunks before the present one that the prompt shows to keep the voice; None: one, but none for a named speaker,
    whose voice the model knows."""
    language: str | None = None
    """Language of the text; None: by its script."""

    def __post_init__(self) -> None:
        check_one_voice(self.speaker, self.voice)
        check_duration(self.max_duration_s)

    @property
    def remembered_chunks(self) -> int:
        """Earlier chunks that the prompt shows."""
        if self.remembered is not None:
            return self.remembered
        return 1 if self.speaker is None else 0


def check_one_voice(speaker: str | None, reference: object, where: str = "speaker") -> None:
    """Raises: ConfigError: a speaker's name beside a reference.

    Args:
        where: the option or argument to name in the error.
    """
    if speaker is not None and reference is not None:
        problem = "a speaker's name and a reference are mutually exclusive"
        raise ConfigError(problem, where, "give one of them")


def check_duration(max_duration_s: float | None, where: str = "max_duration_s") -> None:
    """Raises: ConfigError: a duration that is not in (0, `LONGEST_SPEECH_S`]; None is allowed.

    Args:
        where: the option or argument to name in the error.
    """
    if max_duration_s is not None and not 0 < max_duration_s <= LONGEST_SPEECH_S:
        problem = f"{max_duration_s:g} s is not in (0, {LONGEST_SPEECH_S:g}]"
        raise ConfigError(problem, where, "say a long text in parts, or leave it out")
