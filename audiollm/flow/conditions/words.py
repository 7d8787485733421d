"""Words as numbers for encoders that are trained along: a vocabulary of the training texts, unknown words spelled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-\"()/%"
UNKNOWN = "\ufffd"
NO_VALUE = -1.0
"""The value of a word that is no part of a number."""


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

    def rows(self, text: str) -> list[tuple[int, float]]:
        """The number of each word of a text, and the value of the number that it is part of; at least one row.

        "at 2.5 s" has five words, of which three have the value 2.5.
        """
        found: list[tuple[int, float]] = []
        values = [(match.span(), float(match.group())) for match in _NUMBER.finditer(text)]
        for match in _TOKEN.finditer(text.lower()):
            token, place = match.group(), match.start()
            value = next((value for (start, end), value in values if start <= place < end), NO_VALUE)
            pieces = [token] if token in self._numbers else list(token)
            found += [(self._numbers.get(piece, self._numbers[UNKNOWN]), value) for piece in pieces]
        return found or [(self._numbers[UNKNOWN], NO_VALUE)]


def split_words(text: str) -> list[str]:
    """Words in small letters, single digits, and punctuation marks."""
    return _TOKEN.findall(text.lower())
