"""Words as numbers for encoders that are trained along: a vocabulary of the training texts, unknown words spelled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_NUMBER = re.compile(r"(?P<digits>\d+(?:\.\d+)?)(?P<unit>\s*(?:s|secs?|seconds?)\b)?", re.IGNORECASE)
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
    """The place in time of a word of a number of seconds: that number; 0 for other words."""


class Words:
    """A vocabulary: words of at least two occurrences, digits, punctuation, and letters for all else."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known = tuple(known)
        self._numbers = {word: number for number, word in enumerate(self.known)}
        if UNKNOWN not in self._numbers:
            raise ValueError(f"a vocabulary holds {UNKNOWN!r} for characters that it does not know")

    @classmethod
    def of(cls, texts: Iterable[str], most: int = 20_000) -> Words:
        """The vocabulary of these texts, the most frequent words first."""
        counts = Counter(token for text in texts for token in split_words(text))
        frequent = sorted((-count, word) for word, count in counts.items() if count > 1)
        letters = [UNKNOWN, *_LETTERS]
        return cls([*letters, *(word for _, word in frequent[:most] if word not in letters)])

    def rows(self, text: str) -> list[WordRow]:
        """The words of a text, at least one.

        "at 2.5 s" has five, of which three have the value 2.5 and are at 2.5 s.
        """
        found: list[WordRow] = []
        numbers = list(_NUMBER.finditer(text))
        for match in _TOKEN.finditer(text.lower()):
            token, place = match.group(), match.start()
            whole = next(
                (each for each in numbers if each.start("digits") <= place < each.end("digits")), None
            )
            value = NO_VALUE if whole is None else float(whole.group("digits"))
            at_s = value if whole is not None and whole.group("unit") else 0.0
            pieces = [token] if token in self._numbers else list(token)
            found += [
                WordRow(self._numbers.get(piece, self._numbers[UNKNOWN]), value, at_s) for piece in pieces
            ]
        return found or [WordRow(self._numbers[UNKNOWN])]


def split_words(text: str) -> list[str]:
    """Words in small letters, single digits, and punctuation marks."""
    return _TOKEN.findall(text.lower())
