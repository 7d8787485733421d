"""The stages `describe` and `harvest`: answers into columns, and generated speech that judges agree with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio import Waveform, save
from audiollm.errors import StageError
from audiollm.evaluate.subjects import loading as subjects
from audiollm.evaluate.subjects.protocols import Subject
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines import describe, harvest
from pipelines.compose.rows import read_segments

RATE = 16_000


class Counter:
    """Answers how long a clip is, and nothing about short ones; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, audio: Waveform, question: str) -> str:
        self.asked.append(question)
        return f" {audio.duration_s:.1f}\nseconds " if audio.duration_s > 0.25 else ""


def context(folder: Path) -> Context:
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(quiet=True), {})


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Counter:
    made = Counter()
    monkeypatch.setattr(subjects, "load_answerer", lambda *given: Subject("counter", "1", made))
    return made


@pytest.fixture
def segments(tmp_path: Path) -> Path:
    save(tmp_path / "a.wav", torch.zeros(1, RATE), RATE)
    shared = {"path": str(tmp_path / "a.wav"), "speaker": "ann"}
    rows: list[dict[str, Any]] = [
        {"id": "long", "start_s": 0.0, "end_s": 0.5, "text": "yes", "scene": "a hall", **shared},
        {"id": "bare", "start_s": 0.5, "end_s": 0.8, "text": "", **shared},
        {"id": "short", "start_s": 0.8, "end_s": 1.0, "text": "no", **shared},
    ]
    write_jsonl(tmp_path / "segments.jsonl", rows)
    return tmp_path / "segments.jsonl"


def described(segments: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    config = describe.DescriptionConfig.model_validate(
        {
            "segments": str(segments),
            "model": str(segments.parent),
            "columns": {"scene": "Where?", "text": "What is said?"},
            **settings,
        }
    )
    describe.run_description(config, context(segments.parent / "described"))
    return {row["id"]: row for row in read_jsonl(segments.parent / "described" / "segments.jsonl")}


def test_answers_fill_what_is_empty_and_keep_what_is_there(listener: Counter, segments: Path) -> None:
    rows = described(segments)
    assert (rows["long"]["scene"], rows["long"]["text"]) == ("a hall", "yes")
    assert (rows["bare"]["scene"], rows["bare"]["text"]) == ("0.3 seconds", "0.3 seconds")
    assert rows["bare"]["described_by"] == {"model": "counter", "columns": ["scene", "text"]}
    assert "described_by" not in rows["long"] and "scene" not in rows["short"]
    assert listener.asked == ["Where?", "What is said?", "Where?"]  # not the text of `short`, which it has
    aside = read_jsonl(segments.parent / "described" / "set_aside.jsonl")
    assert [(row["id"], row["kind"], row["reason"]) for row in aside] == [
        ("short", "no scene", "an empty answer")
    ]


def test_answers_are_kept_and_can_replace(listener: Counter, segments: Path) -> None:
    described(segments)
    before = len(listener.asked)
    rows = described(segments, replace=True)
    assert rows["long"]["scene"] == "0.5 seconds"
    # both of `long`, which had columns of its own before, and `short`'s text; the other three answers are kept
    assert len(listener.asked) - before == 3


def test_what_a_segment_is_cannot_be_an_answer(segments: Path) -> None:
    for columns in ({"path": "Where?"}, {"a b": "What?"}, {"scene": " "}, {}):
        with pytest.raises(ValidationError):
            describe.DescriptionConfig.model_validate(
                {"segments": str(segments), "model": str(segments.parent), "columns": columns}
            )


def clip(**changes: Any) -> dict[str, Any]:
    right = {"classifier": True, "speaker": True, "pocketsphinx": None}
    row = {
        "id": "seven_ann_0", "path": "../generate/audio/seven.wav", "text": "seven", "speaker": "ann", "correct": right,
        "duration_s": 0.6, "stopped": True, "problem": None,
    }  # fmt: skip
    return {**row, **changes}


@pytest.mark.parametrize(
    ("changes", "judges", "reason"),
    [
        ({}, None, ""),
        ({}, ["classifier"], ""),
        ({}, ["pocketsphinx"], "not judged by pocketsphinx"),
        ({"correct": {"classifier": True, "speaker": False}}, None, "not what was asked for, says speaker"),
        ({"correct": {"classifier": True, "speaker": False}}, ["classifier"], ""),
        ({"correct": {}}, None, "not judged"),
        ({"stopped": False}, None, "did not end by itself"),
        ({"duration_s": 0.05}, None, "too short"),
        ({"problem": "cannot be read"}, None, "not judged"),
    ],
)
def test_a_clip_is_taken_where_the_judges_agree(
    tmp_path: Path, changes: Mapping[str, Any], judges: list[str] | None, reason: str
) -> None:
    config = harvest.HarvestConfig.model_validate({"clips": str(tmp_path), "judges": judges})
    assert harvest.refusal(clip(**changes), config) == reason


def test_harvested_clips_are_segments(tmp_path: Path) -> None:
    (tmp_path / "evaluate").mkdir()
    clips = tmp_path / "evaluate" / "clips.jsonl"
    write_jsonl(clips, [clip(), clip(id="b", stopped=False)])
    config = harvest.HarvestConfig.model_validate({"clips": str(clips)})
    figures = harvest.run_harvest(config, context(tmp_path / "harvest"))
    assert figures == {"segments": 1, "refused": {"did not end by itself": 1}}
    (segment,), bad = read_segments(tmp_path / "harvest" / "segments.jsonl")
    assert not bad and segment.path == str(tmp_path / "generate" / "audio" / "seven.wav")
    assert (segment.text, segment.speaker, segment.duration_s) == ("seven", "ann", 0.6)
    write_jsonl(clips, [clip(stopped=False)])
    with pytest.raises(StageError, match="no clip .* can be used: 1 did not end by itself"):
        harvest.run_harvest(config, context(tmp_path / "harvest"))
