"""Loops: texts in which a recognizer repeats itself, or writes more than the clip can hold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from audiollm.data.text.words import words_of

MAX_WORDS_PER_SECOND = 12.0
"""Twice the rate of the fastest readers; of scripts without spaces a word is a character."""
MAX_LETTERS_PER_SECOND = 60.0
"""Twice the rate of the fastest readers."""
SPARE_WORDS, SPARE_LETTERS = 12, 60
"""Words and letters that a text may have beyond its clip's rate: a clip of 0.3 s may get a wrong sentence."""
MAX_COMPRESSION_RATIO = 2.4
"""Whisper's own limit (`compression_ratio_threshold`)."""
MIN_REPETITIONS = 10
"""Repetitions in a row of a loop: people repeat a word, too ("ha ha ha")."""
MIN_LOOP_SHARE = 0.5
"""Share of a text's words that are in its loop."""
_LONGEST_PERIOD = 20


def loop_reason(text: str, duration_s: float) -> str | None:
    """The reason why a transcript of a clip is a loop and no text; None where it is one.

    Args:
        text: as the recognizer writes it.
        duration_s: length of the clip in seconds.
    """
    words = words_of(text)
    if len(words) > SPARE_WORDS + MAX_WORDS_PER_SECOND * duration_s:
        return "more words than the clip can hold"
    if sum(len(word) for word in words) > SPARE_LETTERS + MAX_LETTERS_PER_SECOND * duration_s:
        return "more letters than the clip can hold"
    if compression_ratio(text) <= MAX_COMPRESSION_RATIO:
        return None
    repetitions, length = longest_repetition(words)
    if repetitions >= MIN_REPETITIONS and length >= MIN_LOOP_SHARE * len(words):
        return "one phrase again and again"
    return None


def compression_ratio(text: str) -> float:
    """Bytes of a text over its bytes compressed by zlib, as Whisper measures it; 0 without a text."""
    content = text.strip().encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0


def longest_loop(words: Sequence[str]) -> int:
    """Return the most repetitions in a row of one to twenty words; 0 without words."""
    return longest_repetition(words)[0]


def longest_repetition(words: Sequence[str]) -> tuple[int, int]:
    """The most repetitions in a row of one to twenty words, and the number of words that they are.

    Words that are all different are one repetition; no words are none, (0, 0).
    """
    longest, length = (1, 1) if words else (0, 0)
    for period in range(1, min(_LONGEST_PERIOD, len(words) // 2) + 1):
        same = 0
        for place in range(len(words) - period):
            same = same + 1 if words[place] == words[place + period] else 0
            if same // period + 1 > longest:
                longest, length = same // period + 1, (same // period + 1) * period
    return longest, length
