"""The interface of a synthesizer, and the check that a clip can be the speech of its text.

Shapes: N samples.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_VOICE_NAME = re.compile(r"[^\W_][\w.+-]{0,99}")
_BLOCK_S = 0.02
_SILENCE_DBFS = -55.0
"""RMS level of a block below which it counts as silence."""
_MIN_SHARE, _MAX_SHARE, _MAX_EXTRA_S = 0.35, 2.5, 1.5
"""Bounds of the sounding seconds of a clip, relative to `spoken_seconds` of its text; a single word may take longer."""


class SpeechFault(Exception):
    """A text that cannot be spoken, or a clip that is not the speech of its text.

    Args:
        kind: the few words that are counted by.
        reason: for a person.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")


class SynthesizedSpeech(NamedTuple):
    """A mono clip: float32 in [-1, 1], `[N]`, and its sample rate in Hz."""

    samples_N: NDArray[np.float32]
    sample_rate: int


class Synthesizer(ABC):
    """Speaks texts. It is pickled to every worker, and loads what it needs at the first text there."""

    language: str | None = None
    """Language of all speech; None: not known."""
    characters_per_cpu_s: float
    """Characters of text that one core speaks per second; for plans."""
    memory_mb: float = 0.0
    """Memory of a worker that speaks clips of up to 10 s, beside what every worker has; for plans."""
    has_rates: bool = True
    """Whether it speaks at other rates than its own."""

    @property
    def inputs(self) -> list[Path]:
        """Files and folders of the user's that it reads."""
        return []

    @abstractmethod
    def missing(self) -> str | None:
        """What it lacks on this machine, with the remedy; None: nothing."""

    @abstractmethod
    def pick_voices(self, voices: int | Sequence[str] | None, seed: int) -> list[str]:
        """The names of the voices that speak; the same arguments give the same names.

        Args:
            voices: their number, or their names; None: all that the synthesizer has by itself.

        Raises:
            ValueError: there are not so many, or a name is none of its voices.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """What a clip depends on beside text, voice, rate and seed."""

    @abstractmethod
    def speak(self, text: str, voice: str, *, rate: float, seed: int) -> SynthesizedSpeech:
        """Speak a text.

        Args:
            rate: relative to the synthesizer's own; 1.2 is faster.

        Raises:
            SpeechFault: this text cannot be spoken.
        """


def check_voice_name(name: str) -> str:
    """Accept a name that can stand in a path and in a table.

    Raises:
        ValueError: it cannot.
    """
    if not _VOICE_NAME.fullmatch(name):
        raise ValueError(
            f"the voice {name!r}: a name is up to 100 letters, digits and . _ + -, and begins with a letter or digit"
        )
    return name


def pick_named_voices(voices: int | Sequence[str] | None, names: Sequence[str], owner: str) -> list[str]:
    """The voices of a synthesizer with a fixed list of them: the first ones, or those that are named.

    Raises:
        ValueError: there are not so many, or no such name.
    """
    if voices is None:
        return list(names)
    if isinstance(voices, int):
        if voices > len(names):
            raise ValueError(
                f"{owner} has {len(names)} voices ({', '.join(names)}), and {voices} are asked for"
            )
        return list(names[:voices])
    for name in voices:
        if name not in names:
            raise ValueError(f"{owner} has no voice {name!r}; known: {', '.join(names)}")
    return list(voices)


def check_speech(speech: SynthesizedSpeech, text: str, rate: float) -> None:
    """Accept a clip that can be the speech of a text: it is not silent, nor much too short or too long.

    Raises:
        SpeechFault: it is.
    """
    from audiollm.generation.speaking.long_text import spoken_seconds

    samples_N = np.asarray(speech.samples_N, dtype=np.float64)
    if not np.isfinite(samples_N).all():
        raise SpeechFault("broken sound", "samples that are NaN or infinite")
    block = max(1, round(_BLOCK_S * speech.sample_rate))
    padded_N = np.pad(samples_N, (0, -len(samples_N) % block))
    levels_B = np.sqrt(np.square(padded_N.reshape(-1, block)).mean(axis=1))
    loud_B = np.flatnonzero(levels_B > 10 ** (_SILENCE_DBFS / 20))
    if not len(loud_B):
        seconds = len(samples_N) / speech.sample_rate
        raise SpeechFault("silent", f"{seconds:.2f} s without a sound above {_SILENCE_DBFS:g} dBFS")
    sounding_s = (loud_B[-1] - loud_B[0] + 1) * _BLOCK_S
    usual_s = spoken_seconds(text) / rate
    bounds = f"{sounding_s:.2f} s of sound for a text of about {usual_s:.2f} s"
    if sounding_s < _MIN_SHARE * usual_s:
        raise SpeechFault("too short for its text", bounds)
    if sounding_s > _MAX_SHARE * usual_s + _MAX_EXTRA_S:
        raise SpeechFault("too long for its text", bounds)


def package_missing(package: str, extra: str) -> str | None:
    """The sentence about a package that is not installed; None: it is."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        return f"the package {package} is not here: pip install 'audiollm[{extra}]'"
    return None


def files_digest(paths: Sequence[Path]) -> str:
    """The digest of the contents of files."""
    from audiollm.files.atomic import file_digest

    return " ".join(file_digest(path) for path in paths)
