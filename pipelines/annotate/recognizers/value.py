"""Parts that all recognizers share: base settings, the value, and the cutting of long sound for those that need it.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from pipelines.steps.step import StepConfig, Value

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class RecognizerConfig(StepConfig):
    """Base of the settings of every recognizer."""

    name: str | None = Field(None, pattern=_NAME)
    """Name of the recognizer's value; None: its kind. Two recognizers of a run need two names."""


class SpokenWord(NamedTuple):
    """A recognized word; times are in seconds from the start of the segment, None where unknown."""

    word: str
    start_s: float | None
    end_s: float | None
    confidence: float | None


def heard(
    text: str,
    words: Sequence[SpokenWord] = (),
    language: str | None = None,
    language_probability: float | None = None,
    confidence: float | None = None,
) -> Value:
    """Make a recognizer's value.

    Args:
        text: as it writes it; white space is made single.
        words: of the text, as far as it tells about them; may be empty.
        language: a code such as `en`.
        confidence: of the whole, in [0, 1].
    """
    return {
        "text": " ".join(text.split()),
        "language": language,
        "language_probability": _share(language_probability),
        "words": [
            {
                "word": word.word.strip(),
                "start_s": _seconds(word.start_s),
                "end_s": _seconds(word.end_s),
                "confidence": _share(word.confidence),
            }
            for word in words
        ],
        "confidence": _share(confidence),
    }


def mean_confidence(words: Sequence[SpokenWord]) -> float | None:
    """The mean over the words that have one."""
    known = [word.confidence for word in words if word.confidence is not None]
    return sum(known) / len(known) if known else None


def missing_folder(where: str, folder: Path, files: Sequence[str], what: str) -> str | None:
    """Name the missing part of a model's folder, for `Step.missing`.

    Args:
        where: the setting that names it.
        files: files that the folder must hold.
        what: description of the right content, with an article.
    """
    lacking = [name for name in files if not (folder / name).is_file()]
    if not folder.is_dir():
        return f"{where}: no folder {folder}: give {what}"
    return f"{where}: {folder} holds no {' and no '.join(lacking)}: give {what}" if lacking else None


# ------------------------------------------------------------------------------------------------ private


def _share(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(min(max(value, 0.0), 1.0)), 4)


def _seconds(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(max(value, 0.0)), 3)
