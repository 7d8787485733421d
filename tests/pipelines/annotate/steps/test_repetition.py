"""Made-up and circular texts: counts by hand and by brute force, known phrases, and honest text that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.data.text.words import words_of
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.repetition import (
    PHRASES,
    Phrases,
    Repetition,
    RepetitionConfig,
    longest_loop,
    max_ngram_count,
)
from pipelines.steps.step import Listener

WORDS = st.lists(st.sampled_from("abc"), max_size=14)


def measure(
    text: str, duration_s: float = 2.0, given_text: str | None = None, **settings: Any
) -> dict[str, Any]:
    step = Repetition(RepetitionConfig(**settings))
    assert step.missing() is None
    step.setup()
    values = {} if given_text is not None else {"consensus": {"text": text}}
    known = RecordingMetadata(text=given_text)
    value = step.process(Segment("x", 0.0, duration_s, "speech", None, known, values, Listener("x")))
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    return value


def test_numbers_by_hand() -> None:
    assert measure("The cat, the dog and THE hippopotamus!", duration_s=4.0) == {
        "unique_word_share": 0.7143,  # 5 of 7
        "longest_word": 12,
        "longest_ratio": 4.0,
        "max_ngram_count": 0,
        "longest_loop": 1,
        "phrase": None,
        "characters": 32,
        "characters_per_s": 8.0,
        "words_per_s": 1.75,
    }


def test_a_loop_of_a_recognizer_stands_out() -> None:
    assert measure("7 7 7 7")["longest_loop"] == 4
    looped = measure("so we went on " * 12)
    assert looped["longest_loop"] == 12 and looped["unique_word_share"] < 0.1
    assert looped["max_ngram_count"] > 3
    honest = measure(
        "She had your dark suit in greasy wash water all year, and never said a word of it to us."
    )
    assert honest["longest_loop"] == 1 and honest["max_ngram_count"] == 1
    assert honest["unique_word_share"] >= 0.9


def test_scripts_without_spaces_count_characters() -> None:
    assert words_of("今天天气很好。") == list("今天天气很好")
    assert words_of("我用Python写 3.5 行") == ["我", "用", "python", "写", "3.5", "行"]
    value = measure("今天天气很好我们去公园散步然后回家吃饭看电视再睡觉明天继续上班")
    assert value["longest_word"] is None and value["longest_ratio"] is None and value["words_per_s"] == 15.5
    assert measure("谢谢" * 20)["longest_loop"] == 40
    assert words_of("안녕 세상아") == ["안녕", "세상아"]


def test_the_text_is_the_consensus_and_else_the_given_one() -> None:
    assert measure("", given_text="one two two")["unique_word_share"] == 0.6667
    step = Repetition(RepetitionConfig())
    step.setup()
    both = Segment(
        "x",
        0.0,
        1.0,
        "speech",
        None,
        RecordingMetadata("a b"),
        {"consensus": {"text": "a a a"}},
        Listener("x"),
    )
    assert step.process(both)["longest_loop"] == 3


def test_no_text_has_no_shares() -> None:
    value = measure(" ... ")
    assert value["unique_word_share"] is None and value["longest_word"] is None and value["longest_loop"] == 0
    assert measure("")["characters"] == 0


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("Thank you for watching!", "thank you for watching"),
        ("Thank you. Thank you. Thank you.", "thank you"),
        ("Thank you for your letter.", None),
        ("And so it ends. Subtitles by the Amara.org community", "subtitles by the amara.org community"),
        ("ご視聴ありがとうございました", "ご視聴ありがとうございました"),
        ("Продолжение следует...", "продолжение следует"),
        ("İzlediğiniz için teşekkür ederim.", "izlediğiniz için teşekkür ederim"),
        ("Merci d’avoir regardé cette vidéo !", "merci d'avoir regardé cette vidéo"),
        ("", None),
    ],
)
def test_known_phrases(text: str, phrase: str | None) -> None:
    assert measure(text)["phrase"] == phrase


def test_every_known_phrase_is_found() -> None:
    known = Phrases.of(phrase for group in PHRASES.values() for phrase in group)
    for phrase in (phrase for group in PHRASES.values() for phrase in group):
        assert known.found_in(phrase.strip("*").upper() + "."), phrase


def test_phrases_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "phrases.txt"
    path.write_text("# mine\nhold the line\n*call us now*\n\n", encoding="utf-8")
    assert measure("Hold the line", phrases=path)["phrase"] == "hold the line"
    assert measure("please hold the line", phrases=path)["phrase"] is None
    assert measure("so call us now or never", phrases=path)["phrase"] == "call us now"
    assert measure("# mine", phrases=path)["phrase"] is None
    assert measure("Thank you", phrases=path)["phrase"] == "thank you"
    gone = Repetition(RepetitionConfig(phrases=tmp_path / "gone.txt"))
    assert "gone.txt is not a file" in str(gone.missing())


@settings(max_examples=300)
@given(WORDS)
def test_the_longest_loop_by_brute_force(words: list[str]) -> None:
    best = 1 if words else 0
    for start in range(len(words)):
        for period in range(1, len(words) + 1):
            count = 1
            while (
                words[start + count * period : start + (count + 1) * period] == words[start : start + period]
            ):
                count += 1
            best = max(best, count) if start + period <= len(words) else best
    assert longest_loop(words) == best


@settings(max_examples=200)
@given(WORDS, st.integers(1, 4))
def test_ngrams_by_brute_force(words: list[str], size: int) -> None:
    grams = [words[start : start + size] for start in range(len(words)) if start + size <= len(words)]
    assert max_ngram_count(words, size) == max((grams.count(gram) for gram in grams), default=0)


@given(st.text(max_size=60))
def test_any_text_is_measured(text: str) -> None:
    value = measure(text)
    assert value["unique_word_share"] is None or 0 < value["unique_word_share"] <= 1
    assert value["longest_ratio"] is None or value["longest_ratio"] >= 1
