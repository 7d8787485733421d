"""Samples say what the segments say, splits keep apart what they promise, too little is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from audiollm.audio import save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Sample, TextPart
from audiollm.data.text import forms
from audiollm.errors import ConfigError, StageError
from audiollm.files.set_aside import set_aside_row
from audiollm.recipe.runner import Context, run_recipe
from audiollm.recipe.stages import Recipe, StagePlan, load_recipe
from pipelines.compose.stage import STAGE, ComposeConfig, choose_test, plan_compose


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
    config = ComposeConfig.model_validate({"segments": str(source), "min_seconds": 1, **settings})
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {})), folder


def test_one_task_is_given_by_its_name(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(index, split="test" if index < 2 else "train") for index in range(6)]
    figures, _ = _compose(tmp_path, rows, tasks="clone")
    assert figures["tasks"] == {"clone": 6}
    with pytest.raises(ValidationError, match="no such task: 'clon'; did you mean 'clone'"):
        _compose(tmp_path, rows, tasks="clon")


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
        "tasks": {"tts": 2},
        "lacking_fields": {},
        "text_refused": {},
    }


def test_numbers_are_read_in_the_language_of_the_segment(tmp_path: Path) -> None:
    rows: list[Any] = [
        _segment(1, split="train", text="Das kostet 25 Euro.", language="de"),
        _segment(2, split="train", text="Bye, PA. No.", language="en"),
        _segment(3, split="train", text="25 लोग", language="hi"),
        _segment(4, split="test", text="In 25 Minuten", language="German"),
        _segment(5, split="test", text="In 25 minutes"),
    ]
    with pytest.warns(UserWarning, match="texts in 'hi' keep their numbers as digits") as notices:
        forms._warn_of.cache_clear()
        _, folder = _compose(tmp_path, rows)
    assert len(notices) == 1
    samples = read_samples(folder / "samples.jsonl")[0]
    assert [s.texts("user") for s in samples] == [
        ["Das kostet fünfundzwanzig Euro."],
        ["Bye, PA. No."],
        ["25 लोग"],
        ["In fünfundzwanzig Minuten"],
        ["In twenty five minutes"],
    ]
    assert [s.language for s in samples] == ["de", "en", "hi", "German", None]


def test_names_and_texts_that_look_the_same_are_the_same(tmp_path: Path) -> None:
    names = ["Zo\u00eb", "Zoe\u0308", "Zo\u200b\u00eb", "\ufeffZo\u00ad\u00eb"]
    rows: list[Any] = [
        _segment(n, split="test" if n else "train", speaker=name, text=f"I am {name}.")
        for n, name in enumerate(names)
    ]
    figures, folder = _compose(tmp_path, rows)
    assert (figures["speakers"], figures["texts"]) == (1, 1)
    assert {s.metadata["speaker"] for s in read_samples(folder / "samples.jsonl")[0]} == {"Zo\u00eb"}


def test_the_language_of_a_sample_is_that_of_its_reply(tmp_path: Path) -> None:
    rows: list[Any] = [
        _segment(n, split=split, text="Ja, Herr Maier.", language="de", emotion="calm")
        for n, split in ((1, "train"), (2, "test"))
    ]
    _, folder = _compose(tmp_path, rows, tasks={"asr": 1.0, "attributes": 1.0})
    languages = {s.task: s.language for s in read_samples(folder / "samples.jsonl")[0]}
    assert languages == {"asr": "de", "attributes": None}


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
    upstream = set_aside_row("annotate", "x.wav", "no speech found")
    (tmp_path / "annotate" / "set_aside.jsonl").write_text(json.dumps(upstream) + "\n")
    with pytest.raises(StageError, match=reason) as caught:
        _compose(tmp_path, [*rows, _segment(9, text=" ")], **settings)
    assert caught.value.exit_code == 2
    listed = [
        json.loads(line) for line in (tmp_path / "compose" / "set_aside.jsonl").read_text().splitlines()
    ]
    assert listed[0] == upstream
    assert [(row["stage"], row["kind"]) for row in listed[1:]] == [("compose", "no text")]
    assert listed[1]["place"].endswith(".wav") and listed[1]["id"]


def test_malformed_segments_are_set_aside_by_line(tmp_path: Path) -> None:
    bad: list[Any] = ["{", _segment(3, text=None), _segment(4, end_s=0.5), _segment(1)]
    rows = [_segment(1, split="test"), *bad, _segment(2, split="train")]
    figures, folder = _compose(tmp_path, rows)
    listed = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    assert figures["set_aside"] == 4 and figures["train_samples"] + figures["test_samples"] == 2
    assert [row["place"].rsplit("segments.jsonl:", 1)[1] for row in listed] == ["2", "3", "4", "5"]


def test_an_unknown_task_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "segments.jsonl").touch()
    for tasks, reason in (
        ({"ttss": 1.0}, "did you mean 'tts'"),
        ({"tts": 0}, "positive"),
        ({}, "at least one"),
    ):
        with pytest.raises(ValidationError, match=reason):
            ComposeConfig.model_validate({"segments": str(tmp_path / "segments.jsonl"), "tasks": tasks})


def _talk(count: int, **changes: Any) -> list[Any]:
    """Two speakers in turns in one recording, a second apart, and all of it in the training split."""
    rows = [
        _segment(i, path="/data/talk.wav", file="talk.wav", start_s=3.0 * i, end_s=3.0 * i + 2, text=f"word {i}",
                 speaker=("ann", "bob")[i % 2], split="train", **changes)
        for i in range(count)
    ]  # fmt: skip
    return [*rows, _segment(100, speaker="cid", split="test"), _segment(101, speaker="cid", split="test")]


def _of(folder: Path, task: str) -> list[Sample]:
    return [sample for sample in read_samples(folder / "samples.jsonl")[0] if sample.task == task]


def test_several_tasks_by_their_weights(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(i, split="test" if i % 5 == 0 else "train") for i in range(1000)]
    figures, folder = _compose(tmp_path, rows, tasks={"asr": 0.5, "tts": 2.0, "clone": 1.0})
    counts = figures["tasks"]
    assert list(counts) == ["asr", "tts", "clone"] and counts["tts"] == 1000
    assert abs(counts["asr"] - 250) < 60 and abs(counts["clone"] - 500) < 70  # 4 standard deviations
    asr, tts = _of(folder, "asr"), _of(folder, "tts")
    assert asr[0].id in {row["id"] for row in rows} and {sample.id for sample in tts} == {
        f"s{i}.tts" for i in range(1000)
    }
    assert {len(s.audio("user")) for s in asr} == {1} and asr[0].texts("assistant") == [
        asr[0].metadata["text"]
    ]
    assert figures["train_samples"] + figures["test_samples"] == sum(counts.values())
    again, _ = _compose(tmp_path, rows[:500], tasks={"asr": 0.5, "tts": 2.0, "clone": 1.0})
    fewer = {s.id for s in _of(folder, "asr")}
    assert fewer == {s.id for s in asr if int(s.metadata["segment"][1:]) < 500}, (
        "the draw depends on the id alone"
    )
    assert again["tasks"]["tts"] == 500


def test_a_clone_is_of_the_same_speaker_and_split_and_of_another_clip(tmp_path: Path) -> None:
    rows: list[Any] = [
        _segment(i, speaker=f"voice{i % 3}", split="test" if i % 4 == 0 else "train") for i in range(60)
    ]
    rows.append(_segment(99, speaker="alone", split="train"))
    figures, folder = _compose(tmp_path, rows, tasks={"clone": 1, "clone_by_turn": 1})
    by_path = {row["path"]: row for row in rows}
    assert figures["lacking_fields"] == {"clone": 1, "clone_by_turn": 1}
    for sample in read_samples(folder / "samples.jsonl")[0]:
        reference, said = (
            by_path[part.path] for part in [*sample.audio("system"), *sample.audio("assistant")]
        )
        assert reference["id"] != said["id"] == sample.metadata["segment"]
        assert (reference["speaker"], reference["split"]) == (said["speaker"], said["split"])
    chosen = {sample.audio("system")[0].path for sample in _of(folder, "clone")}
    assert len(chosen) > 20, "references are spread over the clips"
    texts = [sample.texts("user") for sample in _of(folder, "clone_by_turn")]
    assert all(len(pair) == 2 for pair in texts)


def test_a_conversation_is_one_clip_with_tagged_turns(tmp_path: Path) -> None:
    figures, folder = _compose(tmp_path, _talk(30, scene="A kitchen."), tasks={"dialogue": 1})
    samples = _of(folder, "dialogue")
    assert figures["tasks"] == {"dialogue": 3}, "30 clips of 3 s in pieces of at most 30 s"
    first = samples[0]
    assert first.audio("assistant") == [AudioPart(path="/data/talk.wav", start_s=0.0, end_s=29.0)]
    lines = first.texts("user")[0].split("\n")
    assert (
        lines[:3] == ["[SPEAKER0] word zero", "[SPEAKER1] word one", "[SPEAKER0] word two"]
        and len(lines) == 10
    )
    assert all("A kitchen." in "".join(sample.texts("system")) for sample in samples)
    for sample in samples:
        (whole,) = sample.audio("assistant")
        for number, part in enumerate(sample.audio("system")):
            assert part.speaker == ("ann", "bob")[number]
            assert whole.end_s is not None and not whole.start_s <= part.start_s < whole.end_s
        assert sample.audio("system") or "SPEAKER0: ann\nSPEAKER1: bob" in sample.texts("system")[0]


def test_a_conversation_ends_at_a_pause_and_where_one_speaks_alone(tmp_path: Path) -> None:
    rows = [row for row in _talk(8) if row["id"] != "s3"]  # 4 s of pause between s2 and s4
    rows += [
        _segment(50 + i, path="/data/alone.wav", start_s=i, end_s=i + 1, split="train") for i in range(5)
    ]
    _, folder = _compose(tmp_path, rows, tasks={"dialogue": 1})
    spans = [(p.start_s, p.end_s) for s in _of(folder, "dialogue") for p in s.audio("assistant")]
    assert spans == [(0.0, 8.0), (12.0, 23.0)]


def test_columns_of_the_segments_are_fields(tmp_path: Path) -> None:
    more = {
        "tags": ["dog", "rain"], "caption": "A dog in the rain.", "language": "English", "age": 34, "question": "Who?",
        "answer": "Ann.", "translation": "Hund", "translation_audio": {"path": "/d/x.wav", "start_s": 1, "end_s": 2},
        "target_language": "German",
    }  # fmt: skip
    rows: list[Any] = [_segment(i, split="train", **more) for i in range(40)]
    rows.append(_segment(98, split="test"))
    names = ["tag", "caption", "attributes", "audio_qa", "speech_translation", "asr", "text"]
    figures, folder = _compose(tmp_path, rows, tasks=dict.fromkeys(names, 1))
    assert figures["tasks"] == {**dict.fromkeys(names, 40), "asr": 41}
    assert figures["lacking_fields"] == {name: 1 for name in names if name != "asr"}
    assert _of(folder, "tag")[0].texts("assistant") == ["dog, rain"]
    assert {"English", "34"} == {t for s in _of(folder, "attributes") for t in s.texts("assistant")}
    translated = _of(folder, "speech_translation")
    assert AudioPart(path="/d/x.wav", start_s=1, end_s=2) in [
        p for s in translated for p in s.audio("assistant")
    ]
    assert ["Hund"] in [s.texts("assistant") for s in translated]
    assert not any(s.audio("user") for s in _of(folder, "text"))


def test_what_a_segment_lacks_is_counted_and_a_task_that_none_can_fill_is_refused(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(1, split="train"), _segment(2, split="test")]
    with pytest.raises(
        StageError, match="no sample of the task caption: s1 and all others lack caption"
    ) as caught:
        _compose(tmp_path, rows, tasks={"tts": 1, "caption": 1})
    assert caught.value.exit_code == 2
    with pytest.raises(StageError, match="dialogue: there is no conversation"):
        _compose(tmp_path, rows, tasks={"dialogue": 1})


def test_sounds_without_speech_have_tasks_of_their_own(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(1, split="train", text="", caption="Rain."), _segment(2, split="test")]
    figures, folder = _compose(tmp_path, rows, tasks={"caption": 1, "asr": 1})
    assert figures["tasks"] == {"caption": 1, "asr": 1} and figures["set_aside"] == 0
    assert _of(folder, "caption")[0].metadata["text"] == ""


def test_sounds_are_tagged_in_the_prompt_and_not_in_the_words(tmp_path: Path) -> None:
    rows: list[Any] = [_segment(1, split="train", text="No [laugh] 2."), _segment(2, split="test")]
    _, folder = _compose(tmp_path, rows)
    sample = _of(folder, "tts")[0]
    assert sample.texts("user") == ["No <SE>[Laughter]</SE> two."] and sample.metadata["text"] == "No two."


def test_a_recording_that_is_none_is_set_aside(tmp_path: Path) -> None:
    rows: list[Any] = [
        _segment(1, split="train", reference={"start_s": 1}),
        _segment(2, split="train", reference="/d/r.wav"),
        _segment(3, split="test"),
        _segment(4, split="test"),
    ]
    figures, folder = _compose(tmp_path, rows, tasks={"clone": 1})
    assert figures["set_aside"] == 1 and figures["tasks"] == {"clone": 3}
    listed = json.loads((folder / "set_aside.jsonl").read_text())
    assert listed["kind"] == "malformed field" and "reference is no recording" in listed["reason"]
    assert _of(folder, "clone")[0].audio("system") == [AudioPart(path="/d/r.wav")]


def test_a_column_may_be_words_and_recordings_in_turn(tmp_path: Path) -> None:
    mine = tmp_path / "turns.yaml"
    chat = [{"system": "{reference}"}, {"user": "{text}"}, {"assistant": "{spoken}"}]
    task = {"about": "word by word", "audio": ["reference", "spoken"], "phrasings": [chat]}
    mine.write_text(json.dumps({"turns": task}))
    one, two = ({"type": "audio", "path": "/d/r.wav", "start_s": i, "end_s": i + 1} for i in (0, 1))
    reference = [{"type": "text", "text": " one"}, one, {"type": "text", "text": " two"}, two]
    more: dict[str, Any] = {"reference": reference, "spoken": reference[2:]}
    wrong = {**more, "spoken": [{"type": "audio", "path": "/d/r.wav", "start_s": 2, "end_s": 1}]}
    rows: list[Any] = [
        _segment(1, split="train", **more), _segment(2, split="train", **wrong), _segment(3, split="test", **more),
    ]  # fmt: skip
    figures, folder = _compose(tmp_path, rows, tasks={"turns": 1}, tasks_file=str(mine))
    assert figures["tasks"] == {"turns": 2} and figures["set_aside"] == 1
    assert "spoken is no recording" in json.loads((folder / "set_aside.jsonl").read_text())["reason"]
    system, _, assistant = _of(folder, "turns")[0].messages
    first, second = (AudioPart.model_validate(part) for part in (one, two))
    assert system.content == [TextPart(text=" one"), first, TextPart(text=" two"), second]
    assert assistant.content == [TextPart(text=" two"), second]


def test_tasks_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "spell:\n  about: spell\n  audio: [audio]\n  phrasings:\n"
        "  - [{user: '{audio}Spell it: {level}'}, {assistant: '{text}'}]\n"
    )
    rows: list[Any] = [_segment(1, split="train", level=3), _segment(2, split="test", level=4)]
    _, folder = _compose(tmp_path, rows, tasks={"spell": 1}, tasks_file=str(mine))
    assert [s.texts("user") for s in _of(folder, "spell")] == [["Spell it: 3"], ["Spell it: 4"]]
    with pytest.raises(ValidationError, match="did you mean 'spell'"):
        ComposeConfig.model_validate({"segments": str(mine), "tasks_file": str(mine), "tasks": {"spel": 1}})


RECIPE = """
stages:
  - annotate: {input: "%s"}
  - compose: {segments: "${annotate.segments}", tasks: {tts: 1.0}, min_seconds: %g}
"""


@pytest.mark.parametrize(("needed", "is_refused"), [(30.0, True), (2.5, True), (1.9, False)])
def test_recordings_that_are_too_short_are_refused_before_they_are_annotated(
    tmp_path: Path, needed: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(4):
        save(tmp_path / "raw" / f"{number}.wav", torch.zeros(1, 8000), 16_000)
    (tmp_path / "r.yaml").write_text(RECIPE % (tmp_path / "raw", needed))
    recipe = load_recipe(tmp_path / "r.yaml", runs=tmp_path / "runs")
    monkeypatch.setattr("audiollm.recipe.runner._run_stages", lambda *arguments: None)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"compose.min_seconds  too little to train on: .* last 2 s in all"
        ):
            run_recipe(recipe, Console(quiet=True))
        assert not (tmp_path / "runs").exists()
    else:
        run_recipe(recipe, Console(quiet=True))
    (recipe.folder / "annotate").mkdir(parents=True, exist_ok=True)
    run_recipe(recipe, Console(quiet=True))  # what is annotated, compose counts by itself


def test_segments_of_another_run_are_counted_by_a_plan(tmp_path: Path) -> None:
    _compose(tmp_path, [_segment(1), _segment(2, end_s=4.0)])
    segments = str(tmp_path / "annotate" / "segments.jsonl")
    config = ComposeConfig.model_validate({"segments": segments, "min_seconds": 4, "tasks": {"tts": 1.0}})
    plan = plan_compose(config, {})
    assert plan.facts["audio_s"] == 5.5 and plan.facts["samples"] == 2 and plan.note == ""
    other = StagePlan(facts={"audio_s": 100.0, "clips": 7.0}, artifacts={"segments": Path("elsewhere")})
    assert plan_compose(config, {"annotate": other}).facts["samples"] == 2
    maker = StagePlan(facts={"audio_s": 100.0, "clips": 7.0}, artifacts={"segments": Path(segments)})
    assert plan_compose(config, {"annotate": maker}).facts["samples"] == 7, "they will be made anew"
