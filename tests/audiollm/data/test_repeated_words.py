"""Loops of recognizers: which transcripts are refused, and that people's speech is not."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from audiollm.data.text.repeated_words import (
    MAX_WORDS_PER_SECOND,
    SPARE_WORDS,
    compression_ratio,
    longest_repetition,
    loop_reason,
)
from audiollm.data.text.words import words_of

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
FAST = "the quick brown fox jumps over the lazy dog while nobody in the whole village looks up from the paper"


@pytest.mark.parametrize(
    ("text", "duration_s", "reason"),
    [
        (" the" * 448, 2.0, "more words"),
        (" the" * 448, 30.0, "more words"),
        (" the" * 224, 30.0, "one phrase"),
        ("I'm sorry, " * 40, 20.0, "one phrase"),
        ("谢谢" * 100, 5.0, "more words"),
        ("谢谢观看" * 25, 30.0, "one phrase"),
        ("a" * 2000, 5.0, "more letters"),
        (f"So it went. {'Thank you. ' * 30}", 25.0, "one phrase"),
    ],
)
def test_loops_are_refused_with_their_reason(text: str, duration_s: float, reason: str) -> None:
    assert reason in (loop_reason(text, duration_s) or "")


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("", 0.0),
        ("", 5.0),
        ("seven", 0.2),
        ("Thank you for watching, and please subscribe to my channel.", 0.3),
        ("five five five five five five five five", 2.5),
        ("ha ha ha ha ha ha ha ha ha", 2.0),
        ("no, no, no, no! Row, row, row your boat", 3.0),
        (FAST, 3.5),
        ("今天天气很好我们去公园玩吧" * 2, 3.0),
    ],
)
def test_speech_is_no_loop(text: str, duration_s: float) -> None:
    assert loop_reason(text, duration_s) is None


def test_a_song_with_a_refrain_is_no_loop() -> None:
    verse = (
        "la " * 10 + "we sang of the river and of boats that go to sea when summer nights are long and warm"
    )
    song = " ".join([verse] * 4)
    repetitions, length = longest_repetition(words_of(song))
    assert repetitions == 10 and length < len(words_of(song)) / 5 and compression_ratio(song) > 2.4
    assert loop_reason(song, 40.0) is None


def test_the_rate_of_words_is_that_of_the_clip() -> None:
    words = [f"w{number}" for number in range(100)]
    limit_s = (len(words) - SPARE_WORDS) / MAX_WORDS_PER_SECOND
    assert loop_reason(" ".join(words), limit_s + 0.01) is None
    assert loop_reason(" ".join(words), limit_s - 0.01) == "more words than the clip can hold"


def test_the_ratio_is_whispers() -> None:
    text = "Thank you. " * 9
    content = text.strip().encode("utf-8")
    assert compression_ratio(text) == len(content) / len(zlib.compress(content)) > 2.4
    assert compression_ratio(" ") == 0.0


@pytest.mark.parametrize(
    ("text", "repetitions", "length"),
    [("", 0, 0), ("a", 1, 1), ("a b", 1, 1), ("x a b a b a b y", 3, 6), ("a a a b a b a b a b", 4, 8)],
)
def test_the_longest_repetition(text: str, repetitions: int, length: int) -> None:
    assert longest_repetition(text.split()) == (repetitions, length)


def test_no_text_of_a_person_is_a_loop() -> None:
    """Texts of LibriSpeech, AudioCaps and RealSI, as fast as nobody speaks: 25 letters or 8 words per second."""
    folder = SHARED / "text_benchmarks"
    if not folder.is_dir():
        pytest.skip(f"no texts at {folder}")
    texts = [
        line.strip()
        for path in sorted(folder.rglob("*.*"))
        if path.suffix in (".csv", ".tsv", ".txt", ".json", ".jsonl")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if 20 < len(line) < 600
    ]
    assert len(texts) > 2000
    seconds = {text: max(len(text) / 25, len(words_of(text)) / 8) for text in texts}
    assert [text for text in texts if loop_reason(text, seconds[text]) is not None] == []
