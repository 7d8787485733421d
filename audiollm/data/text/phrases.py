"""Phrases: a few words at a time, the same in training and in generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from audiollm.data.text.pronunciation import pronounce

_PHRASE_ENDS = ".,;:!?…)]”»。，；：！？、"
"""Punctuation that ends a phrase: speech pauses there."""


@dataclass(frozen=True)
class PhraseLayout:
    """How a model's texts are said phrase by phrase."""

    words: int
    """Most words of a phrase."""
    pronunciation: str | None = None
    """Whose phonemes stand in the place of the words (`audiollm.data.text.pronunciation`); None: the words do."""

    def reading(self, phrase: str) -> str:
        """What the model reads of a phrase."""
        return phrase if self.pronunciation is None else pronounce(phrase, self.pronunciation)


def split_into_phrases(words: Sequence[str], phrase_words: int) -> list[list[str]]:
    """Split words into phrases: cut behind punctuation, and between, as evenly as can be, at `phrase_words`.

    Args:
        phrase_words: most words of a phrase.
    """
    phrases: list[list[str]] = []
    clause: list[str] = []
    for place, word in enumerate(words):
        clause.append(word)
        if place + 1 == len(words) or word[-1] in _PHRASE_ENDS:
            phrases += _split_evenly(clause, phrase_words)
            clause = []
    return phrases


def split_phrases(text: str, phrase_words: int) -> list[str]:
    """Split a text into phrases of at most so many words."""
    return [" ".join(words) for words in split_into_phrases(text.split(), phrase_words)]


def _split_evenly(words: list[str], phrase_words: int) -> list[list[str]]:
    """Split into as few phrases as can be, none of which is more than a word longer than another."""
    count = -(-len(words) // phrase_words)
    edges = [len(words) * number // count for number in range(count + 1)]
    return [words[first:end] for first, end in pairwise(edges)]
