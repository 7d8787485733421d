"""Samples say what the segments say, splits keep apart what they promise, too little is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from audiollm.data.sample import read_samples
from audiollm.recipe import Recipe
from audiollm.runner import Context, StageError
from pipelines.compose import STAGE, Config, choose_test


def _segment(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"s{index}",
        "path": f"/data/ann/{index}.wav",
        "file": f"ann/{index}.wav",
        "start_s": 0.5,
        "end_s": 2.5,
        "speaker": "ann",
        "text": str(index),
        "split": None,
        "heard": {"pocketsphinx": "anything"},
    }
    return {**row, **changes}


def _compose(
    tmp_path: Path, rows: list[dict[str, Any] | str], **settings: Any
) -> tuple[dict[str, Any], Path]:
    source = tmp_path / "annotate" / "segments.jsonl"
    source.parent.mkdir(exist_ok=True)
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    folder = tmp_path / "compose"
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", tmp_path / "test.yaml", "tiny", 0, tmp_path, (), {})
    config = Config.model_validate({"segments": str(source), "min_seconds": 1, **settings})
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {})), folder


def test_a_speech_sample_is_the_chat_it_should_be(tmp_path: Path) -> None:
    rows: list[Any] = [
        _segment(7, split="train"),
        _segment(8, split="test", text=" Take\n 8 ", speaker="bob"),
    ]
    figures, folder = _compose(tmp_path, rows)
    samples, bad = read_samples(folder / "samples.jsonl")
    assert not bad
    assert samples[0].model_dump() == {
        "id": "s7",
        "messages": [
            {
                "role": "system",
                "content": [
                    {"type": "text", "text": "Generate audio following instruction.\n\nSpeaker: ann"}
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "seven"}]},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "audio",
                        "path": "/data/ann/7.wav",
                        "start_s": 0.5,
                        "end_s": 2.5,
                        "speaker": "ann",
                    }
                ],
            },
        ],
        "task": "tts",
        "metadata": {"split": "train", "speaker": "ann", "text": "seven", "segment": "s7"},
    }
    assert samples[1].texts("user") == ["Take eight"]
    assert figures == {
        "train_samples": 1,
        "test_samples": 1,
        "train_seconds": 2.0,
        "test_seconds": 2.0,
        "speakers": 2,
        "texts": 2,
        "set_aside": 0,
    }


def test_text_is_left_as_it_is_on_demand(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(7, split="train"), _segment(8, split="test")]
    _, folder = _compose(tmp_path, rows, normalize_text=False)
    assert [s.texts("user") for s in read_samples(folder / "samples.jsonl")[0]] == [["7"], ["8"]]


@pytest.mark.parametrize("split", ["speaker", "file"])
def test_no_speaker_or_file_is_on_both_sides(tmp_path: Path, split: str) -> None:
    rows: list[Any] = [
        _segment(i, speaker=f"voice{i % 7}", file=f"talk{i // 3}.wav", start_s=i, end_s=i + 1)
        for i in range(60)
    ]
    _, folder = _compose(tmp_path, rows, split=split, test_share=0.3)
    samples, _ = read_samples(folder / "samples.jsonl")
    by_id = {row["id"]: row[split] for row in rows}
    sides = {
        side: {by_id[s.id] for s in samples if s.metadata["split"] == side} for side in ("train", "test")
    }
    assert sides["train"] and sides["test"] and not sides["train"] & sides["test"]
    assert len(samples) == 60


def test_no_split_given_falls_back_to_files(tmp_path: Path) -> None:
    _, folder = _compose(tmp_path, [_segment(i) for i in range(20)])
    splits = [s.metadata["split"] for s in read_samples(folder / "samples.jsonl")[0]]
    assert set(splits) == {"train", "test"}


def test_a_split_that_is_given_in_part_trains_on_the_rest(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(1, split="test"), _segment(2), _segment(3, split="train")]
    _, folder = _compose(tmp_path, rows)
    assert [s.metadata["split"] for s in read_samples(folder / "samples.jsonl")[0]] == [
        "test",
        "train",
        "train",
    ]


@given(st.sets(st.text(), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_both_sides_get_something(groups: set[str], share: float, seed: int) -> None:
    assert 0 < len(choose_test(groups, share, seed)) < len(groups)


def test_the_choice_is_stable_seeded_and_of_the_size_asked_for() -> None:
    few = [f"file{i}.wav" for i in range(500)]
    chosen = choose_test(few, 0.2, seed=0)
    assert choose_test([*few, *(f"new{i}" for i in range(500))], 0.2, seed=0) & set(few) == chosen
    assert choose_test(few, 0.2, seed=1) != chosen
    assert 60 < len(chosen) < 140  # 100 expected, 9 the standard deviation
    assert choose_test(["alone"], 0.5, 0) == set()


@pytest.mark.parametrize(
    ("rows", "settings", "reason"),
    [
        (
            [_segment(1), _segment(2)],
            {"min_seconds": 300},
            r"4 s found and 300 s needed\n  give more recordings",
        ),
        ([_segment(1), _segment(2)], {"min_seconds": 3}, "2 s found and 3 s needed, and 2 s are set apart"),
        ([], {"min_seconds": 0}, "0 s found"),
        ([_segment(1), _segment(2)], {"split": "speaker"}, "at least two speakers, and there is 1"),
        ([_segment(1, split="train"), _segment(2)], {}, "none as test"),
    ],
)
def test_what_cannot_be_trained_on_ends_with_2_and_says_what_was_set_aside(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "annotate").mkdir()
    upstream = {"path": "x.wav", "stage": "annotate", "reason": "no speech found"}
    (tmp_path / "annotate" / "set_aside.jsonl").write_text(json.dumps(upstream) + "\n")
    with pytest.raises(StageError, match=reason) as caught:
        _compose(tmp_path, [*rows, _segment(9, text=" ")], **settings)
    assert caught.value.exit_code == 2
    listed = [
        json.loads(line) for line in (tmp_path / "compose" / "set_aside.jsonl").read_text().splitlines()
    ]
    assert listed[0] == upstream
    assert [(row["stage"], row["reason"]) for row in listed[1:]] == [("compose", "no text")]


def test_malformed_segments_are_set_aside_by_line(tmp_path: Path) -> None:
    bad: list[Any] = ["{", _segment(3, text=None), _segment(4, end_s=0.5), _segment(1)]
    rows = [_segment(1, split="test"), *bad, _segment(2, split="train")]
    figures, folder = _compose(tmp_path, rows)
    listed = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    assert figures["set_aside"] == 4 and figures["train_samples"] + figures["test_samples"] == 2
    assert [row["detail"].split("  ")[0].rsplit(":", 1)[1] for row in listed] == ["2", "3", "4", "5"]


def test_an_unknown_task_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "segments.jsonl").touch()
    for tasks, reason in (
        ({"ttss": 1.0}, "did you mean 'tts'"),
        ({"tts": 0}, "positive"),
        ({}, "at least one"),
    ):
        with pytest.raises(ValidationError, match=reason):
            Config.model_validate({"segments": str(tmp_path / "segments.jsonl"), "tasks": tasks})
