"""Phrases of segments: cut between words by their times, and what has no word times is set aside with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.data.records.manifest import read_samples
from audiollm.errors import StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.compose.phrases import WordTime, cut_phrases
from pipelines.compose.stage import STAGE, ComposeConfig

TEXT = "a man, and two dogs"


def word_times(text: str, unaligned: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """A word each half second, 0.4 s long."""
    return [
        {"word": word, "start_s": 0.5 * n, "end_s": 0.5 * n + 0.4, "score": None if n in unaligned else 0.9}
        for n, word in enumerate(text.split())
    ]


def segment(index: int, words: list[dict[str, Any]] | None, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"s{index}", "path": f"/data/{index}.wav", "start_s": 1.0, "end_s": 4.0, "speaker": "ann",
        "text": TEXT, "split": "train" if index else "test", "language": "en",
        "measured": {} if words is None else {"alignment": {"words": words, "score": 0.9}},
    }  # fmt: skip
    return {**row, **changes}


def compose(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> tuple[list[Any], list[Any]]:
    source = folder / "segments.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe("test", folder / "test.yaml", "tiny", 0, folder, (), {})
    config = ComposeConfig.model_validate({"segments": str(source), "min_seconds": 1, **settings})
    STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    aside = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    return read_samples(folder / "samples.jsonl")[0], aside


def test_speech_is_cut_between_words(tmp_path: Path) -> None:
    rows = [segment(0, word_times(TEXT)), segment(1, word_times(TEXT, unaligned=(1,)))]
    (test, train), aside = compose(tmp_path, rows, phrase_words=2)
    assert not aside
    phrases = [(phrase.text, phrase.end_s) for phrase in test.messages[-1].phrases]
    assert phrases == [("a man,", 0.95), ("and", 1.45), ("two dogs", 3.0)]
    # beside a word whose time was not measured nothing is cut
    assert [phrase.text for phrase in train.messages[-1].phrases] == ["a man, and", "two dogs"]
    assert train.metadata["phrase_words"] == 2


def test_phrases_may_be_read_as_phonemes(tmp_path: Path) -> None:
    """Their words stay; the metadata say whose rules they are by, for generation to read a text in the same way."""
    rows = [segment(number, word_times(TEXT)) for number in range(2)]
    (sample, _), _ = compose(tmp_path, rows, phrase_words=2, pronunciation="espeak:en-us")
    phrases = [(phrase.text, phrase.reading) for phrase in sample.messages[-1].phrases]
    assert phrases == [("a man,", "ɐ | m ˈæ n ,"), ("and", "æ n d"), ("two dogs", "t ˈuː | d ˈɑː ɡ z")]
    assert sample.metadata["pronunciation"] == "espeak:en-us"


def test_phonemes_of_another_language_are_not_taken(tmp_path: Path) -> None:
    rows = [segment(number, word_times(TEXT)) for number in range(2)]
    rows += [segment(2, word_times(TEXT), language="German"), segment(3, word_times(TEXT), language=None)]
    samples, aside = compose(tmp_path, rows, phrase_words=2, pronunciation="espeak:en-us")
    assert [sample.id for sample in samples] == ["s0", "s1", "s3"]
    (row,) = aside
    assert "its language is de, and pronunciation espeak:en-us is of en" in row["reason"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pronunciation": "hibari"}, "set phrase_words, too"),
        ({"phrase_words": 2, "pronunciation": "espeak:xx"}, "knows no language 'xx'"),
        ({"phrase_words": 2, "pronunciation": "letters"}, "no such rules of pronunciation"),
    ],
)
def test_pronunciations_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ComposeConfig.model_validate({"segments": "segments.jsonl", **settings})


def test_samples_that_are_not_speech_have_none(tmp_path: Path) -> None:
    rows = [segment(number, word_times(TEXT)) for number in range(2)]
    samples, _ = compose(tmp_path, rows, phrase_words=2, tasks={"tts": 1.0, "asr": 1.0})
    spoken = {sample.task: bool(sample.messages[-1].phrases) for sample in samples}
    assert spoken == {"tts": True, "asr": False}


def test_what_has_no_word_times_is_set_aside(tmp_path: Path) -> None:
    rows = [
        segment(0, word_times(TEXT)), segment(1, word_times(TEXT)), segment(2, None),
        segment(3, word_times("a man")), segment(4, [{"word": "a"}]),
    ]  # fmt: skip
    samples, aside = compose(tmp_path, rows, phrase_words=2)
    assert [sample.id for sample in samples] == ["s0", "s1"]
    reasons = {row["id"]: row["reason"] for row in aside}
    assert "add the step alignment to annotate" in reasons["s2"]
    assert "its text has 5 words, and annotate aligned 2" in reasons["s3"]
    assert "malformed word times" in reasons["s4"]


def test_where_all_lack_word_times_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no sample of the task tts.*no word times"):
        compose(tmp_path, [segment(number, None) for number in range(2)], phrase_words=2)


def test_words_without_a_length_are_joined() -> None:
    """A cut that would leave a phrase without sound is not made."""
    times = [
        WordTime(word="a", start_s=0, end_s=0, score=0.5), WordTime(word="b", start_s=0, end_s=1, score=0.5)
    ]  # fmt: skip
    assert [phrase.text for phrase in cut_phrases(["a", "b"], times, 2.0, 1)] == ["a b"]
