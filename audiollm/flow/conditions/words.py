"""Words as numbers for encoders that are trained along: a vocabulary of the training texts, unknown words spelled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_SECONDS = r"\s*(?:s|secs?|seconds?)\b"
_NUMBER = re.compile(
    rf"(?P<digits>\d+(?:\.\d+)?)(?P<unit>{_SECONDS}|(?=\s*(?:[-–]|to|and|until)\s*\d+(?:\.\d+)?{_SECONDS}))?",
    re.IGNORECASE,
)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n+")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-\"()/%"
UNKNOWN = "\ufffd"
NO_VALUE = -1.0
"""The value of a word that is no part of a number."""


class WordRow(NamedTuple):
    """A word as an encoder takes it."""

    word: int
    """The number of the word in the vocabulary."""
    value: float = NO_VALUE
    """The value of the number that the word is part of."""
    at_s: float = 0.0
    """The place in time: the number of seconds that stands nearest in the word's sentence, 0 where there is none."""


class Words:
    """A vocabulary: words of at least two occurrences, digits, punctuation, and letters for all else."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._numbers = {word: number for number, word in enumerate(self.vocabulary)}
        if UNKNOWN not in self._numbers:
            raise ValueError(f"a vocabulary holds {UNKNOWN!r} for characters that it does not know")

    @classmethod
    def of(cls, texts: Iterable[str], max_words: int = 20_000) -> Words:
        """The vocabulary of these texts, the most frequent words first."""
        counts = Counter(token for text in texts for token in split_words(text))
        frequent = sorted((-count, word) for word, count in counts.items() if count > 1)
        letters = [UNKNOWN, *_LETTERS]
        return cls([*letters, *(word for _, word in frequent[:max_words] if word not in letters)])

    def rows(self, text: str) -> list[WordRow]:
        """The words of a text, at least one.

        "Rain. A dog barks at 2.5 s." has a row of rain and one of a full stop at 0 s, and all of the dog's at 2.5 s.
        """
        rows = [row for sentence in _BETWEEN_SENTENCES.split(text.lower()) for row in self._rows_of(sentence)]
        return rows or [WordRow(self._numbers[UNKNOWN])]

    def _rows_of(self, sentence: str) -> Iterator[WordRow]:
        numbers = list(_NUMBER.finditer(sentence))
        seconds = [number for number in numbers if number.group("unit") is not None]
        for match in _TOKEN.finditer(sentence):
            number = next(
                (candidate for candidate in numbers if _characters_between(match, candidate) < 0), None
            )
            value = NO_VALUE if number is None else float(number.group("digits"))
            nearest = min(seconds, key=partial(_characters_between, match), default=None)
            at_s = 0.0 if nearest is None else float(nearest.group("digits"))
            token = match.group()
            for piece in [token] if token in self._numbers else token:
                yield WordRow(self._numbers.get(piece, self._numbers[UNKNOWN]), value, at_s)


def split_words(text: str) -> list[str]:
    """Words in small letters, single digits, and punctuation marks."""
    return _TOKEN.findall(text.lower())


def _characters_between(word: re.Match[str], number: re.Match[str]) -> int:
    """Characters between a word and the digits of a number; below 0 for a word that is part of it."""
    return max(number.start("digits") - word.end(), word.start() - number.end("digits"))
