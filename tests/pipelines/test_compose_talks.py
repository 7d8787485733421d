"""The stage `compose_talks`: talks of drawn phrases, their sound, and when each phrase is over."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio import load, save
from audiollm.errors import StageError
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.compose.rows import SegmentRow
from pipelines.compose_talks import ComposeTalksConfig, Phrase, plan_talks, talk_samples

LEVELS = {"one": 0.2, "two": 0.4, "three": 0.6}
PHRASES = [
    Phrase(text="one", target="eins"),
    Phrase(text="Two", target="zwei"),
    Phrase(text="two one", target="einundzwanzig"),
    Phrase(text="four", target="vier"),
]


def row(word: str, speaker: str, split: str, path: str = "x.wav") -> dict[str, object]:
    return {
        "id": f"{word}-{speaker}-{split}", "path": path, "start_s": 0.0, "end_s": 0.5, "speaker": speaker,
        "text": word, "split": split,
    }  # fmt: skip


def rows() -> list[SegmentRow]:
    made = [row(word, speaker, split) for word in LEVELS for speaker in "ab" for split in ("train", "test")]
    return [SegmentRow.model_validate(each) for each in made]


def config(**settings: object) -> ComposeTalksConfig:
    return ComposeTalksConfig.model_validate(
        {"segments": __file__, "phrases": __file__, "talks": 30, "test_talks": 10, **settings}
    )


def test_talks_are_of_one_speaker_and_split_with_pauses_in_their_ranges() -> None:
    talks = plan_talks(rows(), PHRASES, config())
    assert [talk.split for talk in talks] == ["train"] * 30 + ["test"] * 10
    said = {phrase.text for talk in talks for phrase, _ in talk.phrases}
    assert said == {"one", "Two", "two one"}  # nobody says four
    lengths = [len(words) for talk in talks for _, words in talk.phrases]
    assert 0.3 < lengths.count(2) / len(lengths) < 0.7  # by their number of words first
    for talk in talks:
        assert 3 <= len(talk.phrases) <= 5
        assert {word.row.speaker for _, words in talk.phrases for word in words} == {talk.speaker}
        assert {word.row.split for _, words in talk.phrases for word in words} == {talk.split}
        gaps, last_s = [], 0.0
        for phrase, words in talk.phrases:
            assert [word.row.text for word in words] == list(phrase.words)
            gaps.append(words[0].start_s - last_s)
            assert all(0.05 <= b.start_s - a.end_s <= 0.3 for a, b in pairwise(words))
            last_s = words[-1].end_s
        assert all(0.6 <= gap <= 1.2 for gap in gaps)
        assert talk.duration_s == pytest.approx(last_s + 1.5)
    assert plan_talks(rows(), PHRASES, config()) == talks
    assert plan_talks(rows(), PHRASES, config(seed=1)) != talks


def test_talks_to_train_on_are_played_at_several_speeds() -> None:
    talks = plan_talks(rows(), PHRASES, config(speed=[0.8, 1.2], talks=200))
    speeds = {talk.split: set[float]() for talk in talks}
    for talk in talks:
        (speed,) = {word.speed for _, words in talk.phrases for word in words}
        speeds[talk.split].add(round(speed, 6))
        assert all(
            word.end_s - word.start_s == pytest.approx(0.5 / speed)
            for _, words in talk.phrases
            for word in words
        )
    assert speeds == {"train": {0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2}, "test": {1.0}}
    tone_1N = torch.sin(torch.arange(12_000) * 2 * torch.pi * 600 / 24_000)[None]
    sounds = {each.id: tone_1N for each in rows()}
    fastest = next(talk for talk in talks if talk.phrases[0][1][0].speed == 1.2)
    (word, *_) = fastest.phrases[0][1]
    first = round(word.start_s * 24_000)
    heard_1N = talk_samples(fastest, sounds)[:, first : first + 10_000]
    spectrum_F = torch.fft.rfft(heard_1N[0] * torch.hann_window(10_000)).abs()
    assert float(spectrum_F.argmax()) * 24_000 / 10_000 == pytest.approx(720, abs=3)


def test_the_stage_writes_recordings_that_compose_streams_takes(tmp_path: Path) -> None:
    segments = []
    for word, level in LEVELS.items():
        save(tmp_path / f"{word}.wav", torch.full((1, 12_000), level), 24_000)
        segments += [row(word, "a", split, str(tmp_path / f"{word}.wav")) for split in ("train", "test")]
    segments.append(row("one", "gone", "train", str(tmp_path / "gone.wav")))
    write_jsonl(tmp_path / "segments.jsonl", segments)
    write_jsonl(tmp_path / "phrases.jsonl", [phrase.model_dump() for phrase in PHRASES])
    (tmp_path / "recipe.yaml").write_text(
        "name: any\nstages:\n  - compose_talks: {segments: '${here}/segments.jsonl', phrases: '${here}/phrases.jsonl', "
        "talks: 4, test_talks: 2}\n  - compose_streams: {recordings: '${compose_talks.recordings}', chunk_s: 0.32}\n"
    )
    run_recipe(load_recipe(tmp_path / "recipe.yaml", runs=tmp_path), Console(quiet=True))
    folder = tmp_path / "any" / "compose_talks"
    records = read_jsonl(folder / "recordings.jsonl")
    assert [record["split"] for record in records] == ["train"] * 4 + ["test"] * 2
    spoken = {each["id"]: each for each in read_jsonl(folder / "segments.jsonl")}
    for record in records:
        wave = load(folder / record["audio"])
        for number, segment in enumerate(record["segments"]):
            row_of = spoken[f"{record['id']}-{number}"]
            # "two" may go on with "one": it is over after the longest pause inside a phrase
            wait_s = 0.3 if segment["text"] == "Two" else 0.0
            assert segment["end_s"] == pytest.approx(row_of["end_s"] + wait_s, abs=1e-3)
            first_word = segment["text"].casefold().split()[0]
            middle = round((segment["start_s"] + 0.25) * wave.sample_rate)
            assert float(wave.samples_CN[0, middle]) == pytest.approx(LEVELS[first_word], abs=1e-3)
            before = round((segment["start_s"] - 0.05) * wave.sample_rate)
            assert float(wave.samples_CN[0, before]) == 0
    assert "one-gone-train" in (folder / "set_aside.jsonl").read_text(encoding="utf-8")
    streams = read_jsonl(tmp_path / "any" / "compose_streams" / "streams.jsonl")
    assert len(streams) == 6


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(ValidationError, match="else no pause tells"):
        config(pause_s=(0.1, 0.7))
    with pytest.raises(ValidationError, match="phrases_per_talk must rise"):
        config(phrases_per_talk=(5, 3))
    with pytest.raises(StageError, match="no speaker has the words"):
        plan_talks(rows(), [Phrase(text="four", target="vier")], config())
