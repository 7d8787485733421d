"""Which words of a source each word of its translation comes from, learned from the pairs themselves.

The model is IBM's second with a prior for the diagonal (Dyer et al., 2013, fast_align): a target word comes from a
source word by a table of word translations, more likely from one at the same share of its sentence, or from none. The
table is learned by expectation maximisation in both directions, and both are believed: a word needs every source word
that either direction links with it, so it is due late rather than early.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

ITERATIONS = 5
DIAGONAL_TENSION = 4.0
"""How quickly links become unlikely away from the diagonal; fast_align's beginning."""
NULL_PROBABILITY = 0.08
"""Share of words that come from none; fast_align's."""
SMOOTHING = 0.01
STEM_LETTERS = 6
"""First letters by which words are counted as the same: inflections share them, and small corpora have few of each."""
_PUNCTUATION = "\"'.,;:!?()[]{}«»“”‘’¿¡-–—…"
_NONE = ""

Words = Sequence[str]


class WordPair(NamedTuple):
    """A source and its translation, in words."""

    source: Words
    target: Words


def align_words(pairs: Sequence[WordPair]) -> list[list[list[int]]]:
    """For each pair and each word of its translation, the places of the source words that it needs, in order.

    A word that comes from none has an empty list. Deterministic: the same pairs give the same links.
    """
    stemmed = [WordPair(_word_stems(pair.source), _word_stems(pair.target)) for pair in pairs]
    forward = _best_links(stemmed)
    backward = _best_links([WordPair(pair.target, pair.source) for pair in stemmed])
    links: list[list[list[int]]] = []
    for pair, sources, targets in zip(stemmed, forward, backward, strict=True):
        needed: list[set[int]] = [set() if place is None else {place} for place in sources]
        for source_place, target_place in enumerate(targets):
            if target_place is not None:
                needed[target_place].add(source_place)
        links.append([sorted(places) for places in needed])
        assert len(needed) == len(pair.target)
    return links


def due_times(links: Sequence[Sequence[int]], ends_s: Sequence[float]) -> list[float]:
    """The earliest time of each word of a translation: when all source that it needs is over.

    A word that comes from none waits for the next one that comes from some: an article for its noun. Behind the last of
    these, and where none does, words wait for the end.

    Args:
        ends_s: end of each source word in seconds, at least one.
    """
    times: list[float] = []
    following = ends_s[-1]
    for places in reversed(links):
        if places:
            following = max(ends_s[place] for place in places)
        times.append(following)
    return times[::-1]


# Private


def _word_stems(words: Words) -> list[str]:
    return [word.casefold().strip(_PUNCTUATION)[:STEM_LETTERS] or word for word in words]


def _best_links(pairs: Sequence[WordPair]) -> list[list[int | None]]:
    """The likeliest source place of each target word, None for none."""
    table = _learn(pairs)
    return [
        [_best_place(pair, place, table) for place in range(len(pair.target))] if pair.source else []
        for pair in pairs
    ]


def _best_place(pair: WordPair, place: int, table: dict[tuple[str, str], float]) -> int | None:
    weights = _link_weights(pair, place, table)
    best = max(range(len(weights)), key=weights.__getitem__)
    return None if best == 0 else best - 1


def _learn(pairs: Sequence[WordPair]) -> dict[tuple[str, str], float]:
    """The probability of a target word by a source word."""
    vocabulary = len({word for pair in pairs for word in pair.target}) or 1
    table: dict[tuple[str, str], float] = defaultdict(lambda: 1 / vocabulary)
    for _ in range(ITERATIONS):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        for pair in pairs:
            sources = [_NONE, *pair.source]
            for place, word in enumerate(pair.target):
                weights = _link_weights(pair, place, table)
                total = sum(weights)
                for source, weight in zip(sources, weights, strict=True):
                    counts[source, word] += weight / total
                    totals[source] += weight / total
        unseen = SMOOTHING / (SMOOTHING * vocabulary)
        table = defaultdict(lambda unseen=unseen: unseen)  # type: ignore[misc]
        for (source, word), count in counts.items():
            table[source, word] = (count + SMOOTHING) / (totals[source] + SMOOTHING * vocabulary)
    return table


def _link_weights(pair: WordPair, place: int, table: dict[tuple[str, str], float]) -> list[float]:
    """Weights of no source word, and of each."""
    word, share = pair.target[place], (place + 1) / len(pair.target)
    prior = [
        math.exp(-DIAGONAL_TENSION * abs(share - (source + 1) / len(pair.source)))
        for source in range(len(pair.source))
    ]
    scale = (1 - NULL_PROBABILITY) / sum(prior) if prior else 0.0
    linked = [
        scale * weight * table[source_word, word]
        for weight, source_word in zip(prior, pair.source, strict=True)
    ]
    return [NULL_PROBABILITY * table[_NONE, word], *linked]
