"""The result of a recognizer: text, words with times and confidences, language, and the model's signals of doubt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SpokenWord(NamedTuple):
    """A recognized word; times are in seconds from the start of the clip, None where unknown."""

    word: str
    start_s: float | None
    end_s: float | None
    confidence: float | None


@dataclass(frozen=True)
class RecognizedSpeech:
    """The text of a clip as a recognizer writes it. A signal that the model does not have is None."""

    text: str
    words: tuple[SpokenWord, ...] = ()
    language: str | None = None
    """The code that was given or detected, such as `en`."""
    language_probability: float | None = None
    """The probability of the detected language; None where the language was given."""
    mean_log_probability: float | None = None
    """The mean over the tokens, the end of the text included, in nats (Whisper's `avg_logprob`)."""
    num_tokens: int = 0
    """Tokens in that mean."""
    no_speech_probability: float | None = None
    """Whisper's probability, before its first word, that nobody speaks."""

    @property
    def confidence(self) -> float | None:
        """The mean of the words' confidences."""
        return mean_confidence(self.words)


def mean_confidence(words: Sequence[SpokenWord]) -> float | None:
    """The mean over the words that have a confidence; None where none has."""
    confidences = [word.confidence for word in words if word.confidence is not None]
    return sum(confidences) / len(confidences) if confidences else None


def join_transcripts(pieces: Sequence[RecognizedSpeech]) -> RecognizedSpeech:
    """The transcript of a clip that was recognized in pieces.

    The language is that of the first piece, and nobody speaks in the clip only where nobody speaks in any piece.
    """
    tokens = sum(piece.num_tokens for piece in pieces)
    log_probabilities = [piece.mean_log_probability for piece in pieces]
    silences = [piece.no_speech_probability for piece in pieces]
    mean = None
    if tokens and None not in log_probabilities:
        totals = (p.num_tokens * p.mean_log_probability for p in pieces if p.mean_log_probability is not None)
        mean = math.fsum(totals) / tokens
    return RecognizedSpeech(
        " ".join(" ".join(piece.text for piece in pieces).split()),
        tuple(word for piece in pieces for word in piece.words),
        pieces[0].language,
        pieces[0].language_probability,
        mean,
        tokens,
        min((value for value in silences if value is not None), default=None),
    )
