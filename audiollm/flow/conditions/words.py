"""Words as numbers for encoders that are trained along: a vocabulary of the training texts, unknown words spelled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-\"()/%"
UNKNOWN = "\ufffd"


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

    def numbers(self, text: str) -> list[int]:
        """The numbers of a text's words; at least one."""
        found: list[int] = []
        for token in split_words(text):
            pieces = [token] if token in self._numbers else list(token)
            found += [self._numbers.get(piece, self._numbers[UNKNOWN]) for piece in pieces]
        return found or [self._numbers[UNKNOWN]]


def split_words(text: str) -> list[str]:
    """Words in small letters, single digits, and punctuation marks."""
    return _TOKEN.findall(text.lower())
