"""English words without their inflection, so that `dogs bark` and `a dog is barking` are `a dog barking`."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from functools import cache, lru_cache
from typing import Any

_AUXILIARY = re.compile(r"\b(?:is|are|was|were|be|been|being|am)\s+(?=([a-z]+))")
_WORD = re.compile(r"[a-z]{3,}")
_LOCK = threading.Lock()


def without_inflection(plain: str, stems: Collection[str] | None = None) -> str:
    """A text in lower case with the stems of its words (Snowball's English stemmer), without forms of `to be`.

    Args:
        stems: only words with these stems are replaced; None: all. Numbers and short words stay.
    """

    def stem(match: re.Match[str]) -> str:
        stemmed = _stem(match[0])
        return stemmed if stems is None or stemmed in stems else match[0]

    def drop(match: re.Match[str]) -> str:
        return "" if stems is None or match[1] in stems else match[0]

    return _AUXILIARY.sub(drop, _WORD.sub(stem, plain))


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    with _LOCK:  # the stemmer keeps the word at hand in itself
        return str(_stemmer().stemWord(word))


@cache
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("english")
