"""`audiollm convert mmau`, `avqa` and `musicbench`: questions with options, as published, without known mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.audio import save
from audiollm.commands.cli import build_app
from audiollm.data.chat.question_prompts import PROMPTS, question_prompt
from audiollm.data.convert.questions import NOTES, TEMPOS
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import Sample
from audiollm.errors import ConfigError
from audiollm.evaluate.listening.audio_qa import read_questions

AVQA = {
    "id": 184, "video_name": "-HIPq7T3eFI_000011", "video_id": 342,
    "question_text": "What is the main source of sound in the video?",
    "multi_choice": ["Car", "motorcycle", "siren", "gun fire"], "answer": 0, "question_relation": "Both",
    "question_type": "Come From",
}  # fmt: skip


def convert(*arguments: object) -> None:
    build_app("convert")(["convert", *map(str, arguments)], standalone_mode=False)


def converted(folder: Path, kind: str, rows: list[dict[str, Any]], *options: object) -> list[Sample]:
    (folder / "rows.json").write_text(json.dumps(rows))
    convert(kind, folder / "rows.json", "-o", folder / "out.jsonl", *options)
    source = open_source(folder / "out.jsonl")
    return [source[index].sample for index in range(len(source))]


def sounds(folder: Path, *names: str) -> None:
    for name in names:
        save(folder / name, torch.zeros(1, 800), 8_000)


def asked(sample: Sample) -> str:
    return " ".join(sample.texts("user"))


def music(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "dataset": "MusicBench", "location": f"data_aug2/{number}.wav", "main_caption": "A song.",
        "prompt_bpm": "The tempo of this song is Allegro.", "prompt_bt": "The time signature is 4/4.",
        "bpm": 130.0, "key": ["D#", "minor"],
    }  # fmt: skip
    return {**row, **changes}


# ------------------------------------------------------------------------------------------------ AVQA


def test_avqa_asks_about_what_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sounds(tmp_path / "wavs", "-HIPq7T3eFI_000011.wav", "second.flac")
    rows = [
        AVQA,
        {
            **AVQA,
            "id": 1,
            "video_name": "second",
            "answer": 2,
            "question_text": "In the video, what video is it?",
        },
        {**AVQA, "id": 2, "question_relation": "View"},
        {**AVQA, "id": 3, "question_text": "What color is the siren?"},
        {**AVQA, "id": 4, "video_name": "gone"},
        {**AVQA, "id": 5, "answer": 4},
        {**AVQA, "id": 6, "multi_choice": ["Car", "Car", "siren"]},
    ]
    first, second = converted(tmp_path, "avqa", rows, "--audio", tmp_path / "wavs", "--prompt", "ke_omni_r")
    assert asked(first) == (
        "What is the main source of sound in the audio? Please choose the answer from the following options: ['Car', "
        "'motorcycle', 'siren', 'gun fire']. Output the thinking process (less than 50 words) in <think> </think> and "
        "final answer in <answer> </answer>."
    )
    assert first.texts("assistant") == ["<answer>Car</answer>"] and second.texts("assistant") == [
        "<answer>siren</answer>"
    ]
    assert "In the audio, what audio is it?" in asked(second)
    # every path is joined to the folder alone, not to the one before it
    assert [part.path for sample in (first, second) for part in sample.audio("user")] == [
        "wavs/-HIPq7T3eFI_000011.wav", "wavs/second.flac",
    ]  # fmt: skip
    assert first.metadata["choices"] == AVQA["multi_choice"] and first.metadata["split"] == "train"
    told = capsys.readouterr().out
    assert "1 questions of what is seen" in told and "1 of colours" in told and "3 set aside" in told


def test_rows_of_r1_aqa_name_their_file(tmp_path: Path) -> None:
    sounds(tmp_path, "any.wav")
    row = {**AVQA, "audio_path": str(tmp_path / "any.wav"), "dataset_name": "AVQA"}
    (sample,) = converted(tmp_path, "avqa", [row], "--prompt", "r1_aqa")
    assert asked(sample).endswith("'gun fire']. Output the final answer in <answer> </answer>.")


def test_the_length_of_the_thought_reaches_the_prompt(tmp_path: Path) -> None:
    sounds(tmp_path, "-HIPq7T3eFI_000011.wav")
    (sample,) = converted(tmp_path, "avqa", [AVQA], "--prompt", "ke_omni_r", "--max-words", 30)
    assert "(less than 30 words)" in asked(sample)
    with pytest.raises(ConfigError, match="asks for no thought"):
        converted(tmp_path, "avqa", [AVQA], "--prompt", "r1_aqa", "--max-words", 30)


def test_questions_are_drawn_by_the_seed(tmp_path: Path) -> None:
    sounds(tmp_path, "-HIPq7T3eFI_000011.wav")
    rows = [{**AVQA, "id": n, "video_name": AVQA["video_name"] if n % 4 else "gone"} for n in range(40)]
    ids = [
        [sample.id for sample in converted(tmp_path, "avqa", rows, "--count", 10, "--seed", seed)]
        for seed in (1, 1, 2)
    ]
    assert len(set(ids[0])) == 10 and ids[0] == ids[1] != ids[2]


def test_all_questions_about_a_recording_are_held_out_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sounds(tmp_path / "data_aug2", *(f"{n}.wav" for n in range(10)))
    samples = converted(tmp_path, "musicbench", [music(n) for n in range(10)], "--held-out", 0.2)
    splits: dict[str, set[str]] = {}
    for sample in samples:
        splits.setdefault(sample.id.split("_")[1], set()).add(sample.metadata["split"])
    assert sorted(splits.values(), key=min) == [{"test"}] * 2 + [{"train"}] * 8
    held_out = [sample.id for sample in samples if sample.is_held_out]
    assert f"{len(held_out)} of them held out (split: test): {held_out[0]}, " in capsys.readouterr().out
    whole = converted(tmp_path, "musicbench", [music(n) for n in range(10)], "--held-out", 1)
    assert {sample.metadata["split"] for sample in whole} == {"test"}


# ------------------------------------------------------------------------------------------ MusicBench


def test_musicbench_has_prompt_and_answer_for_every_question(tmp_path: Path) -> None:
    sounds(tmp_path / "data_aug2", "7.wav")
    samples = converted(tmp_path, "musicbench", [music(7)], "--prompt", "ke_omni_r")
    assert [sample.id for sample in samples] == ["key_7", "tempo_7", "time_7"]
    for sample, right in zip(samples, ("Eb minor", "Allegro", "4/4"), strict=True):
        choices = sample.metadata["choices"]
        assert sample.texts("assistant") == [f"<answer>{right}</answer>"]
        assert right in choices and len(set(choices)) == 4 and str(choices) in asked(sample)
        assert "<think>" in asked(sample) and sample.metadata["domain"] == "music"


def test_wrong_options_are_wrong(tmp_path: Path) -> None:
    sounds(tmp_path / "data_aug2", *(f"{n}.wav" for n in range(120)))
    tempos, beats = list(TEMPOS), ("4/4", "3/4", "6/8", "2/4", "11/8")
    rows = [
        music(
            n,
            key=[["Gb", "F#", "C#", "B"][n % 4], "Major"],
            prompt_bpm=f"It is {tempos[n % len(tempos)].lower()}.",
            prompt_bt=f"The beat is {beats[n % 5]}",
        )
        for n in range(120)
    ]
    places = []
    for sample in converted(tmp_path, "musicbench", rows):
        choices, right = sample.metadata["choices"], sample.texts("assistant")[0]
        places.append(choices.index(right))
        assert len(set(choices)) == 4
        if sample.id.startswith("key"):
            assert all(choice.split()[0] in NOTES and choice.endswith(" major") for choice in choices)
        elif sample.id.startswith("tempo"):
            assert set(choices) <= set(TEMPOS)  # written alike: the right one is not told by its capitals
            low, high = TEMPOS[right]
            others = [TEMPOS[choice] for choice in choices if choice != right]
            assert all(most < low or least > high for least, most in others)
        else:
            assert not {"3/4", "6/8"} <= set(choices)
    assert {places.count(place) > 50 for place in range(4)} == {True}  # the right one stands anywhere
    moderate = converted(
        tmp_path, "musicbench", [music(0, key=None, prompt_bt=None, prompt_bpm="Andante moderato")]
    )
    assert [sample.texts("assistant")[0] for sample in moderate] == ["Andante moderato"]


# ------------------------------------------------------------------------------------------------ MMAU


def test_other_keys_of_mmau_are_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sounds(tmp_path, "a.wav")
    row = {"audio_id": "a.wav", "question": "Which?", "answer": "rain", "choices": ["rain", "a dog"]}
    own = {"room": "kitchen", "levels": [1, 2.5], "choices_": None}
    (sample,) = converted(tmp_path, "mmau", [{**row, "id": "q", **own}])
    assert sample.metadata == {**own, "split": "train", "choices": ["rain", "a dog"]}
    assert "kept as metadata: room, levels, choices_" in capsys.readouterr().out
    samples = converted(tmp_path, "mmau", [{**row, "id": "q"}])
    assert "kept as metadata" not in capsys.readouterr().out and set(samples[0].metadata) == {
        "split",
        "choices",
    }


def test_questions_of_ones_own_may_be_a_table(tmp_path: Path) -> None:
    sounds(tmp_path, "a b.wav")
    (tmp_path / "q.csv").write_text(
        "file,question,choices,answer,room\n"
        "a b.wav,Which?,rain | a dog,B,kitchen\n"
        'a b.wav,What?,"[""rain, heavy"", ""a dog""]","rain, heavy",\n'
        "a b.wav,Why?,rain|a dog,D,\n"
    )
    convert("mmau", tmp_path / "q.csv", "-o", tmp_path / "out.jsonl")
    source = open_source(tmp_path / "out.jsonl")
    samples = [source[index].sample for index in range(len(source))]
    assert [(sample.id, sample.texts("assistant")[0], sample.metadata) for sample in samples] == [
        ("q-2", "a dog", {"split": "train", "choices": ["rain", "a dog"], "room": "kitchen"}),
        ("q-3", "rain, heavy", {"split": "train", "choices": ["rain, heavy", "a dog"]}),
    ]
    assert "'D' is none of the options" in (tmp_path / "out.set_aside.jsonl").read_text()
    questions = tmp_path / "good.csv"
    questions.write_text("".join((tmp_path / "q.csv").open().readlines()[:3]))
    assert [(q.id, q.audio_id, q.answer) for q in read_questions(questions)] == [
        ("good-2", "a b.wav", "a dog"),
        ("good-3", "a b.wav", "rain, heavy"),
    ]


@pytest.mark.parametrize(
    ("split", "is_held_out"),
    [
        ("train", False),
        ("test", True),
        ("validation", True),
        ("dev", True),
        ("Test", True),
        ("test-mini", False),
    ],
)
def test_splits_of_mmau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, is_held_out: bool
) -> None:
    """A list that is all `test-mini`, as MMAU's is, is left to `--held-out`, and this is said."""
    sounds(tmp_path, "a.wav")
    row = {"audio_id": "a.wav", "question": "Which?", "answer": "rain", "choices": ["rain", "a dog"]}
    (sample,) = converted(tmp_path, "mmau", [{**row, "id": "q", "split": split}])
    assert sample.is_held_out is is_held_out
    assert ("splits that are not read: test-mini" in capsys.readouterr().out) is (split == "test-mini")


def test_options_that_are_told_apart_by_nothing_that_is_said_are_set_aside(tmp_path: Path) -> None:
    """Options are compared by their words, and by signs where the words are equal, as trainings compare them."""
    sounds(tmp_path, "a.wav")
    row = {"audio_id": "a.wav", "question": "Which?", "answer": "F major"}
    rows = [
        {**row, "id": "kept", "choices": ["F major", "F# major"]},
        {**row, "id": "twice", "choices": ["F major", "f major."]},
    ]
    assert [sample.id for sample in converted(tmp_path, "mmau", rows)] == ["kept"]
    aside = [json.loads(line) for line in (tmp_path / "out.set_aside.jsonl").read_text().splitlines()]
    assert [each["id"] for each in aside] == ["twice"] and "all of them different" in aside[0]["reason"]


def test_mmau_keeps_domain_and_difficulty(tmp_path: Path) -> None:
    sounds(tmp_path / "mine", "a.wav", "b.wav")
    row = {
        "id": "q1", "audio_id": "./mine/a.wav", "question": "What is heard?", "choices": ["rain", "a dog"],
        "answer": "rain", "dataset": "mine", "task": "sound", "split": "test", "category": "Reasoning",
        "sub-category": "Events", "difficulty": "easy",
    }  # fmt: skip
    rows = [
        row,
        {**row, "id": "q2", "audio_id": "mine/b.wav", "split": "test-mini"},
        {**row, "id": "q3", "answer": "snow"},
    ]
    first, second = converted(tmp_path, "mmau", rows)
    assert (
        asked(first)
        == "What is heard?\n(A) rain\n(B) a dog\nAnswer with the text of the right option and nothing else."
    )
    assert first.metadata == {
        "split": "test", "domain": "sound", "difficulty": "easy", "category": "Reasoning", "sub_category": "Events",
        "choices": ["rain", "a dog"], "dataset": "mine",
    }  # fmt: skip
    assert first.texts("assistant") == ["rain"] and second.metadata["split"] == "train"
    aside = [json.loads(line) for line in (tmp_path / "out.set_aside.jsonl").read_text().splitlines()]
    assert [each["id"] for each in aside] == ["q3"] and "none of the options" in aside[0]["reason"]


def test_mmau_keeps_what_is_heard(tmp_path: Path) -> None:
    """`{"rewards": {"steps": ...}}` of `train_policy` reads it."""
    sounds(tmp_path, "a.wav")
    row = {
        "id": "q1",
        "audio_id": "a.wav",
        "question": "What?",
        "choices": ["rain", "a dog"],
        "answer": "rain",
    }
    rows = [{**row, "heard": ["rain", "steps"]}, {**row, "id": "q2", "heard": "rain"}]
    (only,) = converted(tmp_path, "mmau", rows)
    assert only.metadata["heard"] == ["rain", "steps"]
    (aside,) = [json.loads(line) for line in (tmp_path / "out.set_aside.jsonl").read_text().splitlines()]
    assert aside["id"] == "q2" and "what is heard must be a list" in aside["reason"]


# --------------------------------------------------------------------------------------------- prompts


def test_prompts_of_ones_own_are_checked() -> None:
    assert question_prompt("Why {so}?", ["a", "b"], "Q: {question} {options}") == "Q: Why {so}? ['a', 'b']"
    for given, words in (
        ("ke_omni", "did you mean 'ke_omni_r'"), ("{question}", "lacks the question or its options"),
        ("{question} {options} {x}", "unknown field {x}"), ("{question", "does not read as a template"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            question_prompt("Why?", ["a", "b"], given)
        assert words in str(caught.value)
    assert set(PROMPTS) == {"options", "ke_omni_r", "ke_omni_r_direct", "r1_aqa"}
    direct = question_prompt("Why?", ["a"], "ke_omni_r_direct")
    assert (
        direct.endswith(" Directly output the final answer in <answer> </answer>.")
        and "process(less" not in direct
    )


def test_options_of_questions_are_refused_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ConfigError, match="sharegpt has no questions with options"):
        convert("sharegpt", tmp_path / "a.json", "-o", tmp_path / "o.jsonl", "--count", 3)
